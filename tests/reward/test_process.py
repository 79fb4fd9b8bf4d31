"""reward=process: where steps end, what a rule says about them, and what the reward set makes of them."""

import math
import random

import pytest

from grpo_lightning.data.arithmetic import Arithmetic
from grpo_lightning.errors import RunError, UsageError
from grpo_lightning.reward import RewardBatch, RewardSet, Step
from grpo_lightning.reward.exact import Exact
from grpo_lightning.reward.process import Process, Steps


def batch(*completions: str, prompt: str = "347+285=", answer: str = "632") -> RewardBatch:
    n = len(completions)
    return RewardBatch([prompt] * n, list(completions), [answer] * n, columns={"level": list(range(n))})


def judged(completion: str, prompt: str = "347+285=") -> list[float | None]:
    return [step.reward for step in Process().steps(batch(completion, prompt=prompt))[0] or []]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>7+5=12,4+8+1=13,3+2+1=6</think>632..", [1, 1, 1, 1]),
        ("<think>12,13,6</think>632", [1, 1, 1, 1]),
        ("632.", [1]),
        ("522.", [0]),
        ("", []),
        # each step on its own merits
        ("<think>7+5=11,4+8+1=13,3+2+1=6</think>632", [0, 1, 1, 1]),
        ("<think>7+5=12,4+8=12,3+2+1=6</think>622", [1, 0, 1, 0]),
        ("<think>7+5=12,4+8+1=13,3+2=5</think>632", [1, 1, 0, 1]),
        ("<think>5+7=12,1+8+4=13,2+1+3=6</think>632", [1, 1, 1, 1]),  # the order of the terms is free
        ("<think>6+6=12,13,6</think>632", [0, 1, 1, 1]),  # the right sum of other digits
        ("<think>12,12,6</think>632", [1, 0, 1, 1]),
        ("<think>13,12,6</think>632", [0, 0, 1, 1]),
        # too few, too many, none, and what is no sum
        ("<think>12</think>632", [1, 1]),
        ("<think>12,13,6,0</think>632", [1, 1, 1, 0, 1]),
        ("<think></think>632", [0, 1]),
        ("<think>12,,6</think>632", [1, 0, 1]),
        ("<think>12,x,6</think>632", [1, 0, 1, 1]),
        ("<think>²,13,6</think>632", [0, 1, 1, 1]),
        # thinking that never ends has no answer; outside of it only the last step can be right
        ("<think>7+5=12,4+8", [1, 0]),
        ("<think>12,13,6", [1, 1, 1]),
        ("12,13,632", [0, 0, 1]),
        ("632,632", [0, 1]),
        ("<think>12,13,6</think>632</think>", [1, 1, 1, 0]),
        ("x<think>12</think>632", [0, 1]),
        ("9" * 5000, [0]),
        ("<think>" + "9" * 5000 + "</think>632", [0, 1]),
        ("<think>7+5=" + "1" * 5000 + "</think>632", [0, 1]),
    ],
)
def test_arithmetic_by_hand(completion, expected):
    assert judged(completion) == expected


def test_the_end_of_a_step_is_behind_its_delimiter():
    completion = "<think>12,13,6</think>632.."
    steps = Process().steps(batch(completion))[0]
    assert steps == [Step(10, 1), Step(13, 1), Step(22, 1), Step(27, 1)]
    assert [completion[a:b] for a, b in ((0, 10), (10, 13), (13, 22), (22, 27))] == [
        "<think>12,",
        "13,",
        "6</think>",
        "632..",
    ]


def test_thinking_that_the_prompt_began():
    assert judged("12,13,6</think>632", "347+285=\n<think>") == [1, 1, 1, 1]


def test_every_sum_written_right_is_right_and_every_digit_changed_is_seen():
    rng = random.Random(0)
    for item in Arithmetic(300).load(0)[0]:
        a, b, carry, long = item.columns["a"], item.columns["b"], 0, []
        for unit in (1, 10, 100):  # the scratchpad from its definition
            x, y = a // unit % 10, b // unit % 10
            terms = [x, y] + ([1] if carry else [])
            long.append((terms, sum(terms)))
            carry = sum(terms) // 10
        right = [f"{'+'.join(map(str, terms))}={value}" for terms, value in long]
        short = [str(value) for _, value in long]
        for entries in (right, short):
            assert judged(f"<think>{','.join(entries)}</think>{a + b}", item.prompt) == [1, 1, 1, 1]
            wrong = rng.randrange(3)
            changed = entries.copy()
            digit = int(changed[wrong][-1])
            changed[wrong] = changed[wrong][:-1] + str((digit + rng.randrange(1, 10)) % 10)
            expected = [float(i != wrong) for i in range(3)] + [1]
            assert judged(f"<think>{','.join(changed)}</think>{a + b}", item.prompt) == expected
        assert judged(f"{a + b + 1}.", item.prompt) == [0]


def test_another_task_than_arithmetic_is_refused():
    with pytest.raises(UsageError, match=r"reward\.process\.check=arithmetic wants prompts such as"):
        Process()(batch("5", prompt="How many?"))


def test_ends():
    assert Steps("\n\n", None, "o").ends("one\n\ntwo\n\n\n\nthree\n\n") == [5, 10, 19]
    assert Steps("\n", None, "o").ends("\n\none\ntwo") == [6, 9]  # blank lines belong to the next step
    assert Steps("x.", None, "o").ends("ax\nb") == [3, 4]
    assert Steps(r"(?<=\.)\s", None, "o").ends("1.5 is. Yes.") == [8, 12]
    assert Steps("", None, "o").ends("ab") in ([1, 2], [2])
    assert Steps(",", None, "o").ends("  ") == []
    assert Steps(None, lambda text: [1, 3], "o").ends("abcd") == [1, 3]


@pytest.mark.parametrize("ends", [[0], [2, 2], [3, 1], [9], [-1]])
def test_a_splitting_function_that_errs_costs_its_row_only(ends):
    process = Process(
        split=lambda text: ends if text == "abcd" else [len(text)], check=lambda steps: [1.0] * len(steps)
    )
    result = RewardSet({"mine": process})(batch("xy", "abcd"))
    assert result.steps == [[Step(2, 1.0)], None]
    assert "mine: row 1: ValueError: the splitting function gave the end" in result.errors[0]


MODULE = """
def split(completion):
    return [i + 1 for i, letter in enumerate(completion) if letter == ";"]

def check(prompt, steps, answer, level, **others):
    assert prompt == "q" and answer == "a" and sorted(others) == ["colour"]
    return [None if "?" in step else float(len(step)) + level for step in steps]

def short(steps):
    return [1.0]
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_steps.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_steps"


def test_own_functions_by_path(module):
    process = Process(split=f"{module}.split", check=f"{module}.check")
    own = RewardBatch(["q", "q"], ["a;", "b;"], ["a", "b"], columns={"level": [0, 10], "colour": ["r", "g"]})
    with pytest.raises(AssertionError):  # the second row has its own answer
        process.steps(own)
    columns = {"level": [0, 10, 20], "colour": ["r", "g", "b"]}
    rows = RewardBatch(["q"] * 3, ["a;bc;?;x", "zz", "z;"], ["a"] * 3, columns=columns)
    assert process.steps(rows) == [[Step(2, 2.0), Step(5, 3.0), Step(7, None)], [], [Step(2, 22.0)]]
    assert process(rows) == [2.5, None, 22.0]
    result = RewardSet({"process": process})(rows)
    assert result.components["process"][0] == 2.5 and math.isnan(result.components["process"][1])
    assert result.steps == [[Step(2, 2.0), Step(5, 3.0), Step(7, None)], [], [Step(2, 22.0)]]


def test_the_number_of_rewards_is_that_of_the_steps(module):
    process = Process(delimiter=",", check=f"{module}.short")
    result = RewardSet({"process": process})(batch("a", "a,b"))
    assert result.steps == [[Step(1, 1.0)], None]
    assert result.errors == ["reward.process: row 1: ValueError: short gave 1 rewards for 2 steps"]
    with pytest.raises(RunError, match="short gave 1 rewards for 2 steps"):
        RewardSet({"process": process})(batch("a,b", "a,b"))


def test_with_exact():
    result = RewardSet({"exact": Exact(), "process": Process(weight=0.5)})(batch("<think>12,12,6</think>632", "522."))
    assert result.total == [1 + 0.5 * 0.75, 0]
    assert result.components["process"] == [0.75, 0]
    assert result.correct == [True, False]
    assert result.steps == [[Step(10, 1), Step(13, 0), Step(22, 1), Step(25, 1)], [Step(4, 0)]]


def test_at_most_one_component_judges_steps():
    with pytest.raises(UsageError, match="one and two judge steps; only one"):
        RewardSet({"one": Process(), "e": Exact(), "two": Process()})
    assert RewardSet({"exact": Exact()})(batch("632")).steps is None
    assert RewardSet({"one": Process()})(batch()).steps == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"check": "math.sqrt"}, "one of delimiter .* and split"),
        ({"check": "math.sqrt", "delimiter": ",", "split": "math.sqrt"}, "one of delimiter .* and split"),
        ({"delimiter": "("}, r"reward\.process\.delimiter '\(' is no regular expression"),
        ({"check": "math.sqrtt", "delimiter": ","}, r"reward\.process\.check=math\.sqrtt: math has no 'sqrtt'"),
        ({"split": "nodots"}, r"reward\.process\.split must be a dotted path"),
        ({"split": "math.pi"}, r"reward\.process\.split=math\.pi is no function but float"),
    ],
)
def test_options(options, message):
    with pytest.raises(UsageError, match=message):
        Process(**options)
