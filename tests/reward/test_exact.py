"""reward=exact: what counts as the answer, and what counts as equal."""

import time

import pytest

from grpo_lightning.errors import UsageError
from grpo_lightning.reward import RewardBatch
from grpo_lightning.reward.exact import Exact


def score(gold: object, completion: str, *, strict: bool = False, prompt: str = "q") -> float | None:
    return Exact(strict=strict)(RewardBatch([prompt], [completion], [gold]))[0]


@pytest.mark.parametrize(
    ("gold", "completion"),
    [
        # the whole completion is searched, the last mark wins
        ("42", "#### 42" + " and so on" * 400),
        ("42", r"\boxed{42}" + "\n" + "x" * 4000),
        ("42", "#### 41\nno:\n#### 42"),
        ("42", r"\boxed{99} and then \boxed{42}"),
        ("42", r"#### 41, better \boxed{42}"),
        ("42", "The answer is 41. Wait. The answer is 42."),
        ("42", "The answer is 42, I hope this answer is helpful."),
        ("42", "The answer is 42 because 50 - 8 is, and I counted 3 times"),
        ("42", "**Answer:** 42"),
        ("42", "Answer:\n42"),
        ("42", "Final answer is: $42$."),
        ("42", "<answer>42</answer> or 43"),
        ("42", r"<answer>\boxed{42}</answer>"),
        ("7", "Answer: 3 + 4 = 7"),
        ("7", "The answer is 3 apples + 4 apples = 7 apples."),
        # without a mark the last number counts
        ("24", "48/2 = 24"),
        ("6", "5 or 6"),
        ("3", "1,2,3"),
        ("12", "The area is 12 m^2."),
        ("12", "an area of 12 cm^{2}"),
        ("7", r"so x \approx 7"),
        ("7", "It makes 7!"),
        ("5", "10-5"),
        # one normaliser everywhere
        ("1234", "1,234"),
        ("1,234", "1234"),
        ("1234", "1234.0"),
        ("1234", "1.234e3"),
        ("1234567", "$1{,}234{,}567$"),
        ("1000", r"\boxed{1,000}"),
        ("308", "308."),
        ("15", "15.00"),
        ("15.00", "15"),
        ("5", " 5 "),
        ("5", "x = 5"),
        ("5", r"\boxed{x=5}"),
        ("90", r"90^\circ = 90"),
        ("90", r"\boxed{90^{\circ}}"),
        ("18", r"\$18"),
        ("18", r"18 \text{ dollars}"),
        ("18", r"\boxed{18 \text{ dollars}}"),
        ("18", r"\boxed{\$18}"),
        ("$18", "18"),
        ("18 dollars", "18"),
        ("5", r"\boxed{5 m^2}"),
        ("5", r"\boxed{5 km/h}"),
        ("7", "007"),
        # signs
        ("-5", "The answer is -5."),
        ("-5", "The answer is −5."),
        ("-5", "-$5"),
        ("-5", "x = - 5"),
        ("-5", "(-5)"),
        # decimals, fractions, percent
        ("0.5", ".5"),
        ("0.1", "0.10"),
        ("0.75", "3/4"),
        ("3/4", "0.75"),
        ("3/4", "6/8"),
        (r"\frac{3}{4}", "0.75"),
        ("3/4", r"\boxed{\dfrac34}"),
        ("-3/4", r"-\frac{3}{4}"),
        ("1.5", "1 1/2"),
        ("1.5", r"\boxed{1\frac{1}{2}}"),
        ("50", "50%"),
        ("50%", "50"),
        ("50%", "0.5"),
        ("0.5", r"\boxed{50\%}"),
        ("50%", "1/2"),
        ("0.30000000000000004", "0.3"),
        # references as data files have them
        (43.0, "43"),
        ("43.0", "43"),
        (7, "7"),
        ("48/2 = <<48/2=24>>24\n#### 24", "24"),
        (r"so it is \boxed{24}", "24"),
        ("9" * 5000, "9" * 5000),
        # other answers as text
        ("Paris", "The answer is Paris."),
        ("Paris", "The answer is paris. It has 2 rivers."),
        ("Paris", r"\boxed{\text{Paris}}"),
        ("olleh", "olleh"),
        ("olleh", "let me see\n  olleh"),
        ("12:30", "The answer is 12:30."),
        ("[1, 2]", "<answer>[1,  2]</answer>"),
        # thinking
        ("6", "<think>5</think>6"),
        ("632", "<think>7+5=12</think>632"),
    ],
)
def test_right(gold, completion):
    assert score(gold, completion) == 1.0


@pytest.mark.parametrize(
    ("gold", "completion"),
    [
        ("1000", "1,001"),
        ("42", r"\boxed{42} and then \boxed{99}"),
        ("42", "#### 42\nno:\n#### 41"),
        ("42", r"42 \boxed{none}"),
        ("5", "The answer is -5"),
        ("-5", "10-5"),
        ("5", "no number"),
        ("5", ""),
        ("5", "..."),
        ("12", "123"),
        # part of an expression that is another number
        ("7", "that makes 10^7"),
        ("7", r"that makes 10^{7}"),
        ("2", "that makes 7^2"),
        ("7", r"that makes 2\sqrt{7}"),
        ("3", r"that makes \sqrt[3]{7}"),
        ("7", r"that makes $7\pi$"),
        ("7", r"that makes 7\sqrt{2}"),
        ("2", r"that makes 7\sqrt2"),
        ("3", r"that makes \log 3"),
        ("123", "12 3"),
        ("3", "H3"),
        ("1", "#### Step 1\nTotal is 8"),
        ("2", r"\boxed{2\sqrt{3}}"),
        ("2", r"\boxed{2\pi}"),
        ("2", r"\boxed{2x}"),
        ("1", r"\boxed{1 or 2}"),
        ("5", r"\boxed{5, 6}"),
        ("12345678901", "12345678902"),
        ("0.3333", "1/3"),
        ("5", "1/0"),
        # the question is not its answer
        ("24", "48/2"),
        ("24", "What is 48/2? The answer is 48/2"),
        # an answer only inside the thinking, or thinking without end
        ("5", "<think>5</think> 6"),
        ("5", "<think>the answer is 5"),
        ("5", "<think>5</think>"),
        ("Paris", "London"),
        ("12:30", "12"),
        ("Paris", "Paris\nor London"),
    ],
)
def test_wrong(gold, completion):
    assert score(gold, completion) == 0.0


@pytest.mark.parametrize("gold", [None, "", "  ", float("nan")])
def test_no_reference_no_score(gold):
    assert score(gold, "5") is None


def test_strict_takes_only_explicit_marks():
    assert score("42", "The answer is 42", strict=True) == 0.0
    assert score("42", "42", strict=True) == 0.0
    assert score("Paris", "Paris", strict=True) == 0.0
    for completion in ("#### 42", r"\boxed{42}", "<answer>42</answer>"):
        assert score("42", completion, strict=True) == 1.0


def test_thinking_that_the_prompt_began():
    assert score("5", "5</think>6", prompt="assistant\n<think>\n") == 0.0
    assert score("6", "5</think>6", prompt="assistant\n<think>\n") == 1.0
    assert score("5", "the answer is 5", prompt="assistant\n<think>\n") == 0.0


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" * 2000,
        "answer is " * 2000,
        " " * 20000,
        "1+" * 10000,
        "1 a" * 10000 + "=",
        "9" * 50000,
        "#### " * 3000,
    ],
)
def test_no_completion_takes_long(text):
    start = time.perf_counter()
    score("5", text)
    score("word", text)
    assert time.perf_counter() - start < 2.0


def test_options():
    with pytest.raises(UsageError, match=r"reward\.exact\.strict"):
        Exact(strict="yes")  # type: ignore[arg-type]
