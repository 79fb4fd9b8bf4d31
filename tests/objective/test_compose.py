"""Composing: presets, precedence, what refuses and what warns, a user's own components, Hydra's state."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.version import getbase
from omegaconf import OmegaConf

from grpo_lightning.objective import Objective, load_objective
from grpo_lightning.objective.load import compose, conf_dir
from tests.objective import options
from tests.objective.options import OPTIONS, PRESETS, full

GROUPS_OF_PRESETS = ("advantage", "ratio", "clip", "kl", "loss_norm", "overlong", "sampling")
CHOICES = {
    "grpo": ("grpo", "token", "symmetric", "k3", "sequence", "none", "all"),
    "dapo": ("grpo", "token", "higher", "none", "token", "soft", "dynamic"),
    "dr_grpo": ("dr_grpo", "token", "symmetric", "none", "constant", "none", "all"),
    "gspo": ("grpo", "sequence", "gspo", "none", "sequence", "none", "all"),
    "rloo": ("rloo", "token", "none", "none", "sequence_sum", "none", "all"),
    "process": ("process", "token", "symmetric", "k3", "sequence", "none", "all"),
    "gspo_token": ("grpo", "sequence_token", "gspo", "none", "sequence", "none", "all"),
    "gtpo": ("gtpo", "token", "higher", "none", "token", "none", "all"),
    "grpo_s": ("grpo_s", "sequence_arithmetic", "higher", "none", "sequence", "none", "all"),
    "dcpo": ("dcpo", "token", "dcpo", "none", "dcpo", "none", "all"),
    "cispo": ("grpo", "token", "cispo", "none", "token", "none", "all"),
    "sapo": ("grpo", "token", "sapo", "none", "sequence", "none", "all"),
    "gmpo": ("grpo", "token", "gmpo", "none", "sequence", "none", "all"),
    "reinforce_pp": ("reinforce_pp", "token", "symmetric", "k1_reward", "sequence", "none", "all"),
    "reinforce_pp_baseline": ("reinforce_pp_baseline", "token", "symmetric", "k2", "sequence", "none", "all"),
    "opo": ("opo", "token", "none", "none", "sequence_sum", "none", "all"),
    "gpg": ("gpg", "token", "none", "none", "token", "none", "all"),
    "maxrl": ("maxrl", "token", "none", "none", "sequence_sum", "none", "all"),
    "gdpo": ("gdpo", "token", "symmetric", "k3", "sequence", "none", "all"),
    "lite_ppo": ("batch_std", "token", "symmetric", "none", "token", "none", "all"),
    "pass_at_k": ("pass_at_k", "token", "none", "none", "sequence_sum", "none", "all"),
    "raft": ("raft", "token", "none", "none", "sequence_sum", "none", "all"),
    "abc": ("grpo", "token", "abc", "none", "sequence", "none", "all"),
    "ppo": ("gae", "token", "symmetric", "k1_reward", "token", "none", "all"),
    "luspo": ("grpo", "sequence", "gspo", "none", "luspo", "none", "all"),
}


def parts(overrides):
    objective = load_objective(overrides)
    return {group: getattr(objective, group) for group in OPTIONS}


def test_the_options_are_those_of_the_folders():
    for group, names in {**OPTIONS, "algorithm": PRESETS}.items():
        assert sorted(path.stem for path in (conf_dir() / group).glob("*.yaml")) == sorted(names)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_its_published_options(preset):
    chosen = dict(zip(GROUPS_OF_PRESETS, CHOICES[preset], strict=True))
    by_hand = [f"{group}={name}" for group, name in chosen.items()]
    # Spelt out on top of another preset the choices give the same objective.
    other = "rloo" if preset == "dapo" else "dapo"
    assert parts([f"algorithm={preset}"]) == parts([f"algorithm={other}", *by_hand])


def test_grpo_is_the_default():
    assert parts([]) == parts(["algorithm=grpo"])


def test_a_choice_on_the_command_line_beats_every_preset():
    for preset, group in (
        ("dapo", "clip"),
        ("dapo", "sampling"),
        ("dr_grpo", "advantage"),
        ("gspo", "ratio"),
        ("rloo", "loss_norm"),
    ):
        for name in OPTIONS[group]:
            overrides = [f"{group}={name}", f"algorithm={preset}"] + (
                ["loss_norm.length=7"] if name == "constant" else []
            )
            chosen, wanted = getattr(load_objective(overrides), group), options.option(group, name)
            assert (type(chosen), vars(chosen)) == (type(wanted), vars(wanted))


def test_the_example_of_the_design():
    objective = load_objective(["algorithm=dapo", "clip=higher", "clip.epsilon_high=0.3"])
    assert vars(objective.clip) == {"epsilon_low": 0.2, "epsilon_high": 0.3}
    rewards, ids, mask = torch.tensor([1.0, 0, 0, 1]), torch.tensor([0, 0, 1, 1]), full(4, 3)
    a = objective.advantages(rewards, ids, mask)
    w = objective.weights(mask, ids)
    logp = torch.zeros(4, 3, requires_grad=True)
    out = objective.loss(logp, torch.full((4, 3), -0.4), a, mask, ids, ref_logp=None, weights=w)
    # ratio exp(0.4) > 1.3: -1.3 A where A > 0, -exp(0.4) A where A < 0; |A| = sqrt(1/2)
    assert out.loss.item() == pytest.approx(0.5**0.5 * (-1.3 + 2.718281828**0.4) / 2, rel=1e-5)


def test_numbers_from_elsewhere_reach_the_options():
    cfg = compose("objective", ["algorithm=dr_grpo", "overlong=soft"])
    OmegaConf.set_struct(cfg, False)
    cfg.rollout = {"max_new_tokens": 50}
    objective = Objective.from_config(cfg)
    assert (objective.loss_norm.length, objective.overlong.max_length) == (50, 50)


def test_from_a_plain_dict():
    cfg = compose("objective", ["algorithm=gspo"])
    plain = {group: dict(cfg[group]) for group in OPTIONS}
    assert Objective.from_config(plain) == load_objective(["algorithm=gspo"])
    del plain["kl"]
    with pytest.raises(ValueError, match=r"no kl._target_"):
        Objective.from_config(plain)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["clip.epsilon=2"], r"clip.epsilon must be in \(0, 1\), got 2"),
        (["clip.epsilon=0"], r"clip.epsilon must be in \(0, 1\), got 0"),
        (["clip.epsilon=wide"], r"clip.epsilon must be a number in \(0, 1\), got 'wide'"),
        (["clip.epsilon=null"], "clip.epsilon must be a number"),
        (["clip.epsilon=true"], "clip.epsilon must be a number"),
        (["clip.epsilon=nan"], "clip.epsilon must be in"),
        (["clip=higher", "clip.epsilon_low=1"], "clip.epsilon_low must be in"),
        (["clip=higher", "clip.epsilon_high=-1"], "clip.epsilon_high must be in"),
        (["clip=higher", "clip.epsilon_high=inf"], "clip.epsilon_high must be in"),
        (["clip=dual", "clip.c=1"], r"clip.c must be in \(1, inf\)"),
        (["clip=two_sided", "clip.delta=1.2"], r"clip.delta must be in \(1.2, inf\)"),
        (["kl.beta=-1"], r"kl.beta must be in \[0, inf\)"),
        (["kl.in_reward=1"], "kl.in_reward must be true or false, got 1"),
        (["advantage.eps=-1"], "advantage.eps must be in"),
        (["advantage.unbiased=no-idea"], "advantage.unbiased must be true or false"),
        (["advantage=batch_std", "advantage.eps=x"], "advantage.eps must be a number"),
        (["advantage=reinforce_pp", "advantage.gamma=1.1"], r"advantage.gamma must be in \(0, 1\]"),
        (["advantage=process", "advantage.eps=-1"], "advantage.eps must be in"),
        (["advantage=gtpo", "advantage.alpha1=-1"], r"advantage.alpha1 must be in \[0, inf\)"),
        (["advantage=gtpo", "advantage.eps=0"], r"advantage.eps must be in \(0, inf\)"),
        (["advantage=grpo_s", "advantage.beta2=-1"], r"advantage.beta2 must be in \[0, inf\)"),
        (["advantage=dcpo", "advantage.unbiased=1"], "advantage.unbiased must be true or false"),
        (["advantage=gdpo", "advantage.eps=x"], "advantage.eps must be a number"),
        (["advantage=reinforce_pp_baseline", "advantage.eps=-1"], "advantage.eps must be in"),
        (["advantage=gae", "advantage.lam=1.5"], r"advantage.lam must be in \[0, 1\]"),
        (["advantage=gae", "advantage.gamma=0"], r"advantage.gamma must be in \(0, 1\]"),
        (["advantage=gae", "advantage.whiten=0"], "advantage.whiten must be true or false"),
        (["clip=cispo", "clip.epsilon_low=1.5"], r"clip.epsilon_low must be in \(0, 1\]"),
        (["clip=cispo", "clip.epsilon_high=0"], "clip.epsilon_high must be in"),
        (["clip=sapo", "clip.tau_pos=0"], r"clip.tau_pos must be in \(0, inf\)"),
        (["clip=sapo", "clip.tau_neg=-1"], "clip.tau_neg must be in"),
        (["clip=gmpo", "clip.epsilon_low=0"], "clip.epsilon_low must be in"),
        (["clip=gmpo", "clip.epsilon_high=0"], "clip.epsilon_high must be in"),
        (["clip=dcpo", "clip.epsilon_low=1"], "clip.epsilon_low must be in"),
        (["clip=dcpo", "clip.epsilon_high=0"], "clip.epsilon_high must be in"),
        (["clip=dcpo", "clip.c=1"], r"clip.c must be in \(1, inf\)"),
        *((["clip=abc", f"clip.epsilon_{k}=0"], f"clip.epsilon_{k} must be in") for k in range(1, 5)),
        (["kl=abs", "kl.beta=-1"], "kl.beta must be in"),
        (["kl=adaptive", "kl.beta=0"], r"kl.beta must be in \(0, inf\)"),
        (["kl=adaptive", "kl.target=0"], "kl.target must be in"),
        (["kl=adaptive", "kl.horizon=0"], "kl.horizon must be in"),
        (["kl=adaptive", "kl.in_reward=1"], "kl.in_reward must be true or false"),
        (["loss_norm=constant", "loss_norm.length=0"], r"loss_norm.length must be in \(0, inf\)"),
        (["overlong=soft", "overlong.max_length=-5"], "overlong.max_length must be in"),
        (["overlong=soft", "overlong.max_length=10", "overlong.cache=11"], r"overlong.cache must be in \[0, 10\]"),
        (["overlong=filter", "overlong.drop_truncated=2"], "overlong.drop_truncated must be true or false"),
        (["sampling=dynamic", "sampling.max_draws=0"], r"sampling.max_draws must be in \[1, inf\)"),
        (["sampling=dynamic", "sampling.max_draws=2.5"], "sampling.max_draws must be an integer"),
        (["sampling=dynamic", "sampling.keep_surplus=3"], "sampling.keep_surplus must be true or false"),
        (["+clip.foo=1"], "clip.foo: .*SymmetricClip takes no `foo`"),
        (["clip._target_=no_such_module.Clip"], "clip._target_=no_such_module.Clip cannot be loaded"),
        (["~clip"], "no clip._target_"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_objective(overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["clip=hgher"],
        ["clipping=higher"],
        ["clip.epsilom=0.3"],
        ["kl=none", "kl.beta=0.1"],
        ["clip=higher", "clip.epsilon=0.3"],
    ],
)
def test_an_unknown_name_is_an_error(overrides):
    with pytest.raises(HydraException):
        load_objective(overrides)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["ratio=sequence", "clip=none"], ("ratio=sequence", "clip=none")),
        (
            ["ratio=sequence", "advantage=reinforce_pp", "advantage.gamma=0.9"],
            ("ratio=sequence", "advantage=reinforce_pp"),
        ),
        (
            ["ratio=sequence", "advantage=reinforce_pp", "kl.in_reward=true"],
            ("ratio=sequence", "reinforce_pp", "kl.in_reward"),
        ),
    ],
)
def test_what_cannot_be_combined_refuses_with_both_names(overrides, names):
    with pytest.raises(ValueError) as error:
        load_objective(overrides)
    assert all(name in str(error.value) for name in names)
    without = [o for o in overrides if not o.startswith("ratio=")]
    assert load_objective(without).ratio == options.option("ratio", "token")


def test_reinforce_pp_without_discount_goes_with_a_sequence_ratio():
    assert load_objective(["ratio=sequence", "advantage=reinforce_pp"]).warnings == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], []),
        (["kl=k1"], ["kl=k1"]),
        (["kl=k1", "kl.in_reward=true"], []),
        (["algorithm=gspo"], []),
        (
            ["ratio=sequence", "loss_norm=token"],
            ["ratio=sequence with loss_norm=token: rows weigh by their length"],
        ),  # T22
        (["ratio=sequence", "loss_norm=constant"], ["ratio=sequence with loss_norm=constant"]),
        (["algorithm=dapo"], []),
        (["algorithm=dr_grpo"], []),
    ],
)
def test_what_is_said_aloud(overrides, expected):
    lines = load_objective(overrides).warnings
    assert len(lines) == len(expected)
    assert all(line.startswith(start) for line, start in zip(lines, expected, strict=True))


class Halved:
    """A user's own advantage in three lines."""

    def __call__(self, rewards, group_ids, mask, *, correct):
        return (rewards * correct / 2)[:, None] * mask


class Counting:
    """A user's own KL with a state, and its own coefficient."""

    def __init__(self, beta):
        self.beta, self.seen = beta, 0

    def __call__(self, logp, ref_logp):
        return (ref_logp - logp).abs()

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Matched:
    """A user's own correction."""

    def __call__(self, old_logp, mask, *, sampler_logp):
        return (old_logp - sampler_logp).exp()


def test_a_users_own_component():
    objective = load_objective([f"advantage._target_={__name__}.Halved"])
    assert objective.warnings == [f"advantage={__name__}.Halved takes no eps, unbiased: left out"]
    assert objective.needs("correct") and not objective.needs("sampler_logp")
    objective.check_group_size(1)
    rewards, ids = torch.tensor([1.0, float("nan"), 2.0]), torch.tensor([0, 1, 2])
    a = objective.advantages(rewards, ids, full(3, 2), correct=torch.tensor([1.0, 1.0, 0.0]))
    assert a.tolist() == [[0.5, 0.5], [0, 0], [0, 0]]
    with pytest.raises(ValueError, match="advantage=Halved needs `correct`"):
        objective.advantages(rewards, ids, full(3, 2))
    with pytest.raises(ValueError, match="takes no `foo`"):
        load_objective([f"advantage._target_={__name__}.Halved", "+advantage.foo=1"])


def test_a_users_own_correction_gets_the_samplers_log_probabilities():
    objective = load_objective([f"correction._target_={__name__}.Matched", "kl=none"])
    assert objective.needs("sampler_logp")
    arguments = (torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), full(1, 2), torch.tensor([0]))
    out = objective.loss(*arguments, sampler_logp=torch.tensor([[0.0, -1.0]]))
    assert out.loss.item() == pytest.approx(-(1 + 2.718281828) / 2)
    with pytest.raises(ValueError, match="correction=Matched needs `sampler_logp`"):
        objective.loss(*arguments)


def test_the_state_of_options_that_have_one():
    objective = load_objective([f"kl._target_={__name__}.Counting"])
    assert objective.needs_reference and objective.kl.beta == 0.04
    objective.kl.seen = 5
    again = load_objective([f"kl._target_={__name__}.Counting"])
    again.load_state_dict(objective.state_dict())
    assert again.kl.seen == 5
    assert load_objective().state_dict() == {}
    with pytest.raises(ValueError, match=r"saved state is of \['kl'\]"):
        load_objective().load_state_dict(objective.state_dict())


def test_inside_initialize_hydras_state_is_the_same_afterwards(tmp_path):
    (tmp_path / "mine.yaml").write_text("a: 1\n")
    with initialize_config_dir(str(tmp_path), version_base="1.2"):
        before, base = GlobalHydra.instance().hydra, getbase()
        assert load_objective(["algorithm=dapo"]).sampling.max_draws == 10
        assert GlobalHydra.instance().hydra is before
        assert getbase() == base
        assert hydra_compose("mine").a == 1
        with pytest.raises(HydraException):
            load_objective(["clip=hgher"])
        assert GlobalHydra.instance().hydra is before
    assert not GlobalHydra.instance().is_initialized()
    load_objective()
    assert not GlobalHydra.instance().is_initialized()


def test_inside_a_hydra_application(tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "app.yaml").write_text("a: 1\n")
    (tmp_path / "app.py").write_text(
        "import hydra\n"
        "from hydra.core.global_hydra import GlobalHydra\n"
        "from hydra.core.hydra_config import HydraConfig\n"
        "from grpo_lightning.objective import load_objective\n"
        "@hydra.main(version_base='1.3', config_path='conf', config_name='app')\n"
        "def main(cfg):\n"
        "    before, name = GlobalHydra.instance().hydra, HydraConfig.get().job.config_name\n"
        "    print('epsilon', load_objective(['algorithm=dapo', 'clip.epsilon_high=0.3']).clip.epsilon_high)\n"
        "    print('same', GlobalHydra.instance().hydra is before, HydraConfig.get().job.config_name == name, cfg.a)\n"
        "main()\n"
    )
    root = str(Path(__file__).parents[2])
    run = subprocess.run(
        [sys.executable, "app.py", "a=2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": root, "PATH": ""},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["epsilon 0.3", "same True True 2"]
    assert not run.stderr


def test_an_advantage_of_a_package_outside_the_repository(tmp_path):
    (tmp_path / "my_pkg").mkdir()
    (tmp_path / "my_pkg" / "__init__.py").write_text("from my_pkg.median import Median\n")
    (tmp_path / "my_pkg" / "median.py").write_text(
        "from dataclasses import dataclass\n"
        "from grpo_lightning.objective.groups import per_token\n"
        "@dataclass(frozen=True)\n"
        "class Median:\n"
        "    scale: float = 1.0\n"
        "    def __call__(self, rewards, group_ids, mask):\n"
        "        middle = {int(g): rewards[group_ids == g].nanmedian() for g in group_ids.unique()}\n"
        "        baseline = rewards.new_tensor([middle[int(g)] for g in group_ids])\n"
        "        return per_token(self.scale * (rewards - baseline), mask)\n"
    )
    (tmp_path / "use.py").write_text(
        "import torch\n"
        "from grpo_lightning.objective import load_objective\n"
        "o = load_objective(['algorithm=dapo', 'advantage._target_=my_pkg.Median', '+advantage.scale=2.0'])\n"
        "mask = torch.ones(3, 2, dtype=torch.bool)\n"
        "a = o.advantages(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([4, 4, 4]), mask)\n"
        "print(a.tolist(), *o.warnings)\n"
        "out = o.loss(torch.zeros(3, 2), None, a, mask, torch.tensor([4, 4, 4]))\n"
        "print(out.loss.item())\n"
    )
    paths = f"{Path(__file__).parents[2]}{os.pathsep}{tmp_path}"
    run = subprocess.run(
        [sys.executable, "use.py"], cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": paths, "PATH": ""}
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0].startswith("[[0.0, 0.0], [-2.0, -2.0], [8.0, 8.0]] advantage=my_pkg.Median takes no eps, unbiased")
    assert float(lines[1]) == pytest.approx(-2)
