"""The YAML files of the group say what the classes take, and each packages itself under its own name."""

from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from grpo_lightning.reward import RewardSet

FOLDER = Path(__file__).parents[2] / "conf" / "reward"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_every_option_builds(name):
    conf = OmegaConf.load(FOLDER / f"{name}.yaml")
    assert list(conf) == [name]
    if name == "function":
        conf.function.path = "statistics.mean"
    if name == "code":
        conf.code.isolation = "best"  # it refuses at once where the machine does not allow what it needs
    component = instantiate(conf[name], _convert_="all")
    rewards = RewardSet({name: component})
    assert component.weight == conf[name].weight == 1.0
    rewards.close()
    assert rewards.has_correctness == (name in ("code", "exact", "math", "reasoning_gym"))


def test_the_placebo_follows_the_seed_of_the_run():
    conf = OmegaConf.merge(OmegaConf.load(FOLDER / "random.yaml"), {"seed": 7})
    assert conf.random.seed == 7
