from pathlib import Path

import pytest
from omegaconf import OmegaConf

from grpo_lightning.errors import UsageError
from grpo_lightning.reward import RewardBatch
from grpo_lightning.reward.format import Format
from grpo_lightning.reward.random import Random

DEFAULT = OmegaConf.load(Path(__file__).parents[2] / "conf" / "reward" / "format.yaml").format.pattern


def formatted(completion: str, pattern: str = DEFAULT, prompt: str = "q") -> float | None:
    return Format(pattern)(RewardBatch([prompt], [completion], [None]))[0]


@pytest.mark.parametrize(
    "completion",
    [
        "<think>a</think>b",
        "<think>a\nb</think>\n\nc\nd",
        "<think></think>b",
        "\n<think>\n</think>\nb",
        "<think>1 < 2</think>",
    ],
)
def test_thinking_then_answer(completion):
    assert formatted(completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "b",
        "a<think>a</think>b",
        "<think>a",
        "a</think>b",
        "<think>a<think>b</think>c</think>d",
        "<think>a</think>b<think>c</think>",
        "<think>a</think>b</think>",
        "<think>a</thinking>b",
        "think>a</think>b",
    ],
)
def test_no_such_form(completion):
    assert formatted(completion) == 0.0


def test_the_whole_completion_has_to_match():
    assert formatted("ab\n12", r"[a-z]+.\d+") == 1.0
    assert formatted("ab\n12 ", r"[a-z]+.\d+") == 0.0


def test_thinking_that_the_prompt_began():
    assert formatted("a</think>b", prompt="assistant\n<think>") == 1.0
    assert formatted("<think>a</think>b", prompt="assistant\n<think>") == 0.0


@pytest.mark.parametrize("pattern", ["(", None, 3])
def test_a_bad_pattern(pattern):
    with pytest.raises(UsageError, match=r"reward\.format\.pattern"):
        Format(pattern)


def drawn(rate: float, keys: list[tuple[int, ...]], seed: int = 0) -> list[float | None]:
    return Random(rate, seed)(RewardBatch(["q"] * len(keys), ["c"] * len(keys), [None] * len(keys), keys=keys))


def test_random_has_its_rate():
    keys = [(0, i) for i in range(4000)]
    assert sum(drawn(0.3, keys)) / 4000 == pytest.approx(0.3, abs=0.03)  # 4 standard deviations
    assert set(drawn(0.0, keys)) == {0.0}
    assert set(drawn(1.0, keys)) == {1.0}


def test_random_depends_on_the_key_and_the_seed_alone():
    keys = [(r, p, s) for r in range(4) for p in range(4) for s in range(8)]
    scores = drawn(0.5, keys)
    assert drawn(0.5, keys[::-1]) == scores[::-1]
    assert drawn(0.5, keys[40:60]) == scores[40:60]
    assert drawn(0.5, keys, seed=1) != scores
    assert scores[:8] != scores[8:16] and scores[:32] != scores[32:64]


@pytest.mark.parametrize("rate", [-0.1, 1.5, "0.5", None, True, float("nan")])
def test_a_bad_rate(rate):
    with pytest.raises(UsageError, match=r"reward\.random\.rate must be a number from 0 to 1"):
        Random(rate)


def test_a_bad_seed():
    with pytest.raises(UsageError, match=r"reward\.random\.seed"):
        Random(0.5, seed="x")  # type: ignore[arg-type]
