"""reward=function: users' functions by dotted path, with the signatures they have."""

import functools
import os
import sys
import time

import pytest

from grpo_lightning.errors import RunError, UsageError
from grpo_lightning.reward import RewardBatch, RewardSet
from grpo_lightning.reward.function import Function

MODULE = """
import functools

def trl(prompts, completions, **kwargs):
    return [len(p) + len(c) + level for p, c, level in zip(prompts, completions, kwargs["level"])]

def some(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]

def everything(prompts, completions, completion_ids, level, answer, bonus=0.0, **columns):
    return [sum(ids) + bonus for ids in completion_ids]

def wants_more(completions, difficulty):
    return [0.0] * len(completions)

def partly(completions, **kwargs):
    return [float(c) for c in completions]

async def coroutine(completions):
    return [0.0] * len(completions)

class Scorer:
    def __init__(self, value=2.0):
        self.value = value
    def __call__(self, completions, **kwargs):
        return [self.value] * len(completions)
    def method(self, completions):
        return [self.value + 1] * len(completions)

scorer = Scorer()
bound = functools.partial(everything, bonus=10.0)
number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the current directory, which is not on the path (as with a console script)."""
    (tmp_path / "user_rewards.py").write_text(MODULE)
    (tmp_path / "user_broken.py").write_text("import module_that_is_not_there\n")
    (tmp_path / "user_raises.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    yield "user_rewards"
    for name in ("user_rewards", "user_broken", "user_raises"):
        sys.modules.pop(name, None)


def batch(completions: list[str]) -> RewardBatch:
    n = len(completions)
    return RewardBatch(
        ["q"] * n, completions, ["1"] * n, {"level": list(range(n))}, [[i, i] for i in range(n)], [0] * n
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("trl", [2, 3]),
        ("some", [1, 0]),
        ("everything", [0, 2]),
        ("bound", [10, 12]),
        ("scorer", [2, 2]),
        ("scorer.method", [3, 3]),
    ],
)
def test_any_callable_in_the_current_directory(module, name, expected):
    assert Function(f"{module}.{name}")(batch(["1", "2"])) == expected


def test_keyword_arguments(module):
    assert Function(f"{module}.everything", kwargs={"bonus": 5})(batch(["1", "2"])) == [5, 7]


def test_callables_themselves(module):
    partial = Function(functools.partial(lambda completions, k: [k] * len(completions), k=4))
    assert partial(batch(["1"])) == [4]
    assert partial.name == "<lambda>"
    Function(f"{module}.scorer")
    assert Function(sys.modules[module].scorer).name == "Scorer"


def test_two_functions_of_the_same_name_stay_apart():
    def score(value):
        def f(completions):
            return [value] * len(completions)

        return Function(f)

    result = RewardSet({"one": score(1.0), "two": score(2.0)})(batch(["1"]))
    assert result.components == {"one": [1.0], "two": [2.0]}


def test_a_function_that_raises_is_named_with_its_row(module):
    rewards = RewardSet({"mine": Function(f"{module}.partly")})
    result = rewards(batch(["1", "x", "3"]))
    assert (result.total[0], result.total[2]) == (1, 3)
    assert result.errors == ["reward.mine: row 1: ValueError: could not convert string to float: 'x'"]
    with pytest.raises(RunError, match=r"reward\.mine: row 0: ValueError"):
        rewards(batch(["x", "y"]))


def test_a_column_that_is_not_there(module):
    with pytest.raises(UsageError, match=r"wants_more wants `difficulty`.*there are: answer, .*level"):
        RewardSet({"mine": Function(f"{module}.wants_more")})(batch(["1"]))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, "reward.function.path is needed"),
        ("nodots", "must be a dotted path"),
        ("a b.c", "must be a dotted path"),
        ("user_rewrds.trl", "no module 'user_rewrds'.*did you mean 'user_rewards'"),
        ("user_rewards.trll", "user_rewards has no 'trll'; did you mean 'trl'"),
        ("user_rewards.scorer.methd", "has no 'methd'; did you mean 'method'"),
        ("user_rewards.number", "is no function but int"),
        ("user_rewards.Scorer", "is a class"),
        ("user_rewards.coroutine", "is a coroutine"),
        ("user_broken.f", "importing user_broken failed: No module named 'module_that_is_not_there'"),
        ("user_raises.f", "importing user_raises failed: ZeroDivisionError"),
    ],
)
def test_paths_that_lead_nowhere(module, path, message):
    with pytest.raises(UsageError, match=message) as error:
        Function(path)
    assert "\n" not in str(error.value)


APART = """
import os, signal, threading, time

def score(completions, answer, factor=1):
    assert threading.current_thread() is threading.main_thread()
    signal.alarm(0)  # only a main thread may
    print("not in the way of the answers")
    if "sleep" in completions:
        time.sleep(60)
    if "die" in completions:
        os._exit(3)
    return [float(c) * factor for c in completions]

def pid(completions):
    return [os.getpid()] * len(completions)
"""


@pytest.fixture
def apart(tmp_path, monkeypatch):
    (tmp_path / "scored_apart.py").write_text(APART)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return "scored_apart"


def test_a_time_out_ends_the_call_and_not_the_run(apart):
    slow = Function(f"{apart}.score", kwargs={"factor": 2}, timeout=2.0)
    rewards = RewardSet({"mine": slow, "other": Function(lambda completions: [1.0] * len(completions))})
    try:
        assert rewards(batch(["1", "2"])).components["mine"] == [2, 4]
        start = time.perf_counter()
        result = rewards(batch(["1", "sleep"]))
        assert time.perf_counter() - start < 10
        assert result.total == [1, 1]  # from the other one
        assert result.errors == [f"reward.mine: row {i}: scored_apart.score took longer than 2 s" for i in range(2)]
        assert rewards(batch(["3"])).components["mine"] == [6]  # in another process
        assert "took longer" in rewards(batch(["die"])).errors[0]
        with pytest.raises(RunError, match=r"reward\.mine: row 0: ValueError: could not convert"):
            rewards(batch(["x"]))  # its own faults are reported as ever
    finally:
        rewards.close()
    assert slow._pool is None


def test_only_with_a_time_out_it_runs_in_another_process(apart):
    assert Function(f"{apart}.pid")(batch(["1"])) == [os.getpid()]
    component = Function(f"{apart}.pid", timeout=60)
    try:
        first = component(batch(["1"]))
        assert first != [os.getpid()] and component(batch(["1"])) == first
    finally:
        component.close()


@pytest.mark.parametrize("timeout", [0, -1, True, "5", float("inf"), float("nan")])
def test_bad_time_outs(module, timeout):
    with pytest.raises(UsageError, match=r"reward\.function\.timeout must be seconds above 0 or null"):
        Function(f"{module}.trl", timeout=timeout)


def test_a_time_out_needs_a_path():
    with pytest.raises(UsageError, match=r"reward\.function\.timeout needs a dotted path"):
        Function(lambda completions: [], timeout=1.0)


def test_bad_keyword_arguments(module):
    with pytest.raises(UsageError, match=r"reward\.function\.kwargs"):
        Function(f"{module}.trl", kwargs=[1])  # type: ignore[arg-type]
