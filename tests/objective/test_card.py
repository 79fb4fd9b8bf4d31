"""The algorithm card: every option has a formula and a source; numbers stand in the place of their names."""

import inspect
import re
from pathlib import Path

import pytest

from grpo_lightning import config
from grpo_lightning.card import card, differences
from grpo_lightning.objective import load_objective
from grpo_lightning.objective.card import formula, term, terms
from grpo_lightning.objective.load import compose
from tests.objective.options import OPTIONS, PRESETS, option

SOURCELESS = {"sampling=all", "correction=none"}


def card_of(*overrides: str) -> str:
    cfg = config.compose_checked(list(overrides))
    return card(cfg, config.check(cfg), compose("train", list(overrides), with_hydra=True).hydra.runtime.choices)


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group, names in OPTIONS.items() for name in names], ids="=".join
)
def test_every_option_says_its_formula_and_its_source(group, name):
    what = term(option(group, name))
    assert len(what.formula) > 3 and "  " not in what.formula
    assert what.source or f"{group}={name}" in SOURCELESS
    assert not re.search(r"\bNone\b", what.formula)


def test_numbers_stand_in_the_place_of_their_names():
    what = term(load_objective(["clip=higher", "clip.epsilon_high=0.3"]).clip)
    assert what.formula.startswith("-min(rho A, clip(rho, 1 - 0.2, 1 + 0.3) A)")
    assert "arXiv 2503.14476" in what.source


def test_a_users_option_without_words_is_named_by_its_class():
    objective = load_objective(["kl=none", f"advantage._target_={__name__}.Mine"])
    assert ("A", "advantage=Mine", ("", "")) in [(s, n, tuple(t)) for s, n, t in terms(objective)]


class Mine:
    def __call__(self, rewards, group_ids, mask):
        return rewards[:, None] * mask


def test_the_loss_has_the_terms_that_act():
    assert formula(load_objective(["kl=none"])) == "loss = sum_{i,t} w_{i,t} l_{i,t}"
    assert formula(load_objective(["kl=k3"])) == "loss = sum_{i,t} w_{i,t} ( l_{i,t} + kl_{i,t} )"
    assert "kl" not in formula(load_objective(["kl=k3", "kl.in_reward=true"]))
    assert "h(c l)" in formula(load_objective(["kl=none", "correction=tis", "entropy=bonus"]))
    groups = [name.partition("=")[0] for _, name, _ in terms(load_objective(["algorithm=rloo"]))]
    assert groups == ["advantage", "clip", "loss_norm"]  # REINFORCE has no ratio


def test_the_whole_card():
    text = card_of(
        "algorithm=dapo", "clip.epsilon_high=0.3", "kl=k2", "reward=[exact,format]", "reward.format.weight=0.5"
    )
    assert "algorithm=dapo  loss = sum_{i,t} w_{i,t} ( l_{i,t} + kl_{i,t} )" in text
    assert "r_i = 1 exact + 0.5 format" in text
    assert "clip(rho, 1 - 0.2, 1 + 0.3)" in text
    assert "differs from the preset: clip.epsilon_high=0.3, kl=k2" in text
    assert "P = 48 prompts, G = 8 completions of at most 48 tokens" in text


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_does_not_differ_from_itself(preset):
    cfg = compose("train", [f"algorithm={preset}"], with_hydra=True)
    assert differences(cfg, cfg.hydra.runtime.choices) == []


def test_differences_are_what_would_be_typed():
    typed = ["advantage=rloo", "clip=dual", "clip.c=5", "sampling=frontier", "sampling.floor=0.5"]
    cfg = compose("train", typed, with_hydra=True)
    assert sorted(differences(cfg, cfg.hydra.runtime.choices)) == sorted(typed)
    by_experiment = compose("train", ["experiment=dapo_paper"], with_hydra=True)
    assert differences(by_experiment, by_experiment.hydra.runtime.choices) == ["overlong.cache=4096"]


@pytest.mark.parametrize("group", OPTIONS)
def test_the_files_of_a_group_are_short(group):
    place = Path(inspect.getfile(load_objective)).parent / group
    files = list(place.glob("*.py")) or [place.with_suffix(".py")]
    for file in files:
        assert len(file.read_text().splitlines()) <= 100, file.name
