"""The YAML files of the group say what the classes take, and each has the whole template block."""

from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from grpo_lightning.data import Item, tokenize
from grpo_lightning.data.prompts import render
from grpo_lightning.reward import RewardBatch
from grpo_lightning.reward.exact import Exact
from tests.data.tokenizers_for_tests import tokenizer

FOLDER = Path(__file__).parents[2] / "conf" / "data"
TEMPLATE = {"template", "system_prompt", "chat", "max_prompt_tokens", "long_prompts"}


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_every_option_builds_and_has_the_template_block(name):
    if name == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    conf = OmegaConf.load(FOLDER / f"{name}.yaml")
    if name == "file":
        conf.path = "somewhere.jsonl"
    assert conf.keys() >= TEMPLATE
    block = {key: conf[key] for key in TEMPLATE}
    item = Item("2+3=", "5", {})
    assert "2+3=" in str(render(item, block["template"]))
    assert len(tokenize([item], tokenizer(), **block)[0]) == 1
    source = instantiate({key: value for key, value in conf.items() if key not in TEMPLATE}, _convert_="all")
    assert callable(source.load)


def test_rows_count_as_one_by_what_the_template_shows():
    conf = OmegaConf.merge(OmegaConf.load(FOLDER / "file.yaml"), {"path": "x", "template": "{Body} {prompt}"})
    assert conf.distinct == "{Body} {prompt}"


@pytest.mark.parametrize(("name", "completion"), [("gsm8k", "so\n#### 5"), ("reasoning_gym", "so <answer>5</answer>")])
def test_the_form_a_template_asks_for_is_read_by_exact(name, completion):
    template = OmegaConf.load(FOLDER / f"{name}.yaml").template
    assert ("####" in template) == ("####" in completion)
    assert ("<answer>" in template) == ("<answer>" in completion)
    assert Exact(strict=True)(RewardBatch(["q"], [completion], ["5"])) == [1.0]
