"""The YAML files of the group say what the classes take, and each packages itself under its own name."""

from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from grpo_lightning.reward import RewardSet
from tests.reward.classifiers import save, token_classifier

FOLDER = Path(__file__).parents[2] / "conf" / "reward"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_every_option_builds(name, tmp_path):
    conf = OmegaConf.load(FOLDER / f"{name}.yaml")
    assert list(conf) == [name]
    if name == "function":
        conf.function.path = "statistics.mean"
    if name == "http":
        conf.http.url = "http://127.0.0.1:1/score"
    if name in ("model", "process_model"):
        conf[name].path = (save if name == "model" else token_classifier)(tmp_path)
    if name == "code":
        conf.code.isolation = "best"  # it refuses at once where the machine does not allow what it needs
    component = instantiate(conf[name], _convert_="all")
    rewards = RewardSet({name: component})
    assert component.weight == conf[name].weight == 1.0
    rewards.close()
    assert rewards.has_correctness == (name in ("code", "exact", "math", "noisy", "reasoning_gym"))


@pytest.mark.parametrize("name", ["random", "noisy"])
def test_chance_follows_the_seed_of_the_run(name):
    conf = OmegaConf.merge(OmegaConf.load(FOLDER / f"{name}.yaml"), {"seed": 7})
    assert conf[name].seed == 7


def test_lengths_follow_the_longest_completion():
    conf = OmegaConf.merge(OmegaConf.load(FOLDER / "length.yaml"), {"rollout": {"max_new_tokens": 48}})
    assert conf.length.max_length == 48
