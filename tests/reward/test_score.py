"""RewardSet: adding up by name and weight, and every way in which a reward function can be wrong."""

import functools
import math
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from grpo_lightning.errors import RunError, UsageError
from grpo_lightning.reward import RewardBatch, RewardSet, Step
from grpo_lightning.reward.score import Unscored


@dataclass
class Fixed:
    """A component that gives these values, or what a function of the batch gives."""

    values: Any
    weight: float = 1.0
    correctness: bool = False
    closed: bool = False

    def __call__(self, batch: RewardBatch) -> Any:
        return self.values(batch) if callable(self.values) else self.values

    def close(self) -> None:
        self.closed = True


def batch(n: int = 4) -> RewardBatch:
    return RewardBatch(
        prompts=["q"] * n,
        completions=[f"c{i}" for i in range(n)],
        answers=["a"] * n,
        columns={"level": list(range(n))},
        completion_ids=[[i] for i in range(n)],
        group_ids=[0] * n,
        keys=[(0, i) for i in range(n)],
        finish_reasons=["stop"] * n,
    )


def test_weights_add_up():
    result = RewardSet({"a": Fixed([1, 0], 0.7), "b": Fixed([0.0, 0.5], 0.3)})(batch(2))
    assert result.total == pytest.approx([0.7, 0.15])
    assert result.components == {"a": [1.0, 0.0], "b": [0.0, 0.5]}  # raw, without weights
    assert result.errors == []


def test_none_and_nan_are_left_out_and_are_not_zero():
    result = RewardSet({"a": Fixed([1, None, math.nan, None]), "b": Fixed([1, 1, None, None], 2.0)})(batch())
    assert result.total[:2] == [3.0, 2.0]
    assert math.isnan(result.total[2]) and math.isnan(result.total[3])
    assert math.isnan(result.components["a"][1]) and math.isnan(result.components["a"][2])
    assert result.errors == []


def test_correct_wants_every_correctness_component():
    rewards = RewardSet(
        {
            "x": Fixed([1, 1, 0, None], correctness=True),
            "y": Fixed([1, 0.5, 1, None], correctness=True),
            "shaping": Fixed([0, 9, 9, 9]),
        }
    )
    assert rewards(batch()).correct == [True, False, False, None]
    assert rewards.has_correctness
    only_shaping = RewardSet({"shaping": Fixed([1] * 4)})
    assert only_shaping(batch()).correct == [None] * 4
    assert not only_shaping.has_correctness


@pytest.mark.parametrize(
    "values", [np.array([1, 2, 3, 4]), torch.tensor([1.0, 2, 3, 4]), (1, 2, 3, 4), [True, 2, 3, 4]]
)
def test_arrays_tensors_tuples_and_booleans(values):
    assert RewardSet({"a": Fixed(values)})(batch()).total == [1, 2, 3, 4]


def test_scalars_of_other_libraries():
    values = [np.float32(0.5), torch.tensor(2.0), np.int64(3), np.bool_(True)]
    assert RewardSet({"a": Fixed(values)})(batch()).total == [0.5, 2, 3, 1]


@pytest.mark.parametrize("values", [[1.0], [1, 2, 3], [1] * 5, [], torch.ones(1), np.ones(8)])
def test_wrong_length_is_never_broadcast(values):
    with pytest.raises(RunError, match=rf"reward\.mine gave {len(values)} scores for 4 completions"):
        RewardSet({"ok": Fixed([1] * 4), "mine": Fixed(values)})(batch())


@pytest.mark.parametrize("values", [1.0, None, "1234", {"a": 1}, torch.tensor(1.0)])
def test_not_a_list(values):
    with pytest.raises(RunError, match=r"reward\.mine must give a list of 4 numbers"):
        RewardSet({"mine": Fixed(values)})(batch())


def test_infinities_and_other_things_leave_their_row_out_and_are_reported():
    result = RewardSet({"mine": Fixed([1, math.inf, "good", -math.inf])})(batch())
    assert result.total[0] == 1 and all(math.isnan(t) for t in result.total[1:])
    assert [line.split(": ")[:2] for line in result.errors] == [["reward.mine", f"row {i}"] for i in (1, 2, 3)]
    assert "'good'" in result.errors[1]


def test_an_exception_costs_its_own_row_only():
    def f(rows: RewardBatch) -> list[float]:
        if "c2" in rows.completions:
            raise ValueError("cannot read c2")
        return [float(c[1]) for c in rows.completions]

    result = RewardSet({"ok": Fixed(lambda rows: [10.0] * len(rows)), "mine": Fixed(f)})(batch())
    assert result.components["mine"][:2] == [0, 1] and result.components["mine"][3] == 3
    assert math.isnan(result.components["mine"][2])
    assert result.total == [10, 11, 10, 13]
    assert result.errors == ["reward.mine: row 2: ValueError: cannot read c2"]


def test_an_exception_in_every_row_ends_the_run():
    def f(rows: RewardBatch) -> list[float]:
        raise KeyError("level")

    with pytest.raises(RunError, match=r"reward\.mine: row 0: KeyError: 'level'"):
        RewardSet({"mine": Fixed(f)})(batch())


def test_every_row_unusable_ends_the_run_but_every_row_none_does_not():
    with pytest.raises(RunError, match=r"reward\.mine: row 0: the score \[1\.0\] is not a number"):
        RewardSet({"mine": Fixed(torch.ones(4, 1))})(batch())
    assert all(math.isnan(t) for t in RewardSet({"mine": Fixed([None] * 4)})(batch()).total)


def test_usage_errors_pass_through():
    def f(rows: RewardBatch) -> list[float]:
        raise UsageError("what is missing")

    def g(rows: RewardBatch) -> list[float]:
        if len(rows) > 1:
            raise ValueError("one at a time")
        return f(rows)

    for function in (f, g):
        with pytest.raises(UsageError, match="what is missing"):
            RewardSet({"mine": Fixed(function)})(batch())


def test_nothing_to_score():
    result = RewardSet({"mine": Fixed(lambda rows: [max(rows.completions)])})(batch(0))
    assert (result.total, result.components, result.correct) == ([], {"mine": []}, [])


def test_a_row_has_the_same_fields():
    row = batch().row(2)
    assert row == RewardBatch(["q"], ["c2"], ["a"], {"level": [2]}, [[2]], [0], [(0, 2)], ["stop"])


@pytest.mark.parametrize("weight", [None, "1", math.inf, math.nan, True])
def test_weights_are_finite_numbers(weight):
    with pytest.raises(UsageError, match=r"reward\.mine\.weight"):
        RewardSet({"mine": Fixed([1], weight)})


def test_components_are_checked():
    with pytest.raises(UsageError, match="at least one"):
        RewardSet({})
    with pytest.raises(UsageError, match=r"reward\.mine: partial is not a reward component.*reward=function"):
        RewardSet({"mine": functools.partial(max)})  # type: ignore[dict-item]


def test_close():
    component = Fixed([1])
    RewardSet({"mine": component}).close()
    assert component.closed


@dataclass
class Stepwise(Fixed):
    def steps(self, batch: RewardBatch) -> Any:
        return self(batch)


def test_steps_are_checked_row_by_row():
    given = [
        [(1, 1.0), (2, None)],
        [Step(2, math.nan)],
        [(1, math.inf)],
        [(1, 1.0), (1, 1.0)],
        [(3, 1.0)],
        7,
        None,
        [(1, True), (2, torch.tensor(0.0))],
    ]
    result = RewardSet({"mine": Stepwise(given)})(batch(8))
    assert result.steps == [[Step(1, 1.0), Step(2, None)], [Step(2, None)], *[None] * 5, [Step(1, 1.0), Step(2, 0.0)]]
    assert [line.split(": ")[1] for line in result.errors] == ["row 2", "row 3", "row 4", "row 5"]
    assert result.components["mine"][0] == 1 and result.components["mine"][7] == 0.5
    assert all(math.isnan(score) for score in result.components["mine"][1:7])
    with pytest.raises(RunError, match=r"reward\.mine gave 1 scores for 2 completions"):
        RewardSet({"mine": Stepwise([[]])})(batch(2))


def test_components_are_scored_at_the_same_time_and_keep_their_order():
    meeting = threading.Barrier(3, timeout=20)

    def waits(value: float) -> Any:
        def f(rows: RewardBatch) -> list[float]:
            meeting.wait()  # breaks unless all three come
            return [value + i for i in range(len(rows))]

        return f

    result = RewardSet({name: Fixed(waits(v)) for name, v in (("c", 1.0), ("a", 10.0), ("b", 100.0))})(batch(2))
    assert list(result.components) == ["c", "a", "b"]
    assert result.components == {"c": [1, 2], "a": [10, 11], "b": [100, 101]}


def test_what_wants_the_calling_thread_gets_it():
    threads = {}

    def f(rows: RewardBatch) -> list[float]:
        threads["here"] = threading.current_thread()
        return [1.0] * len(rows)

    def g(rows: RewardBatch) -> list[float]:
        threads["there"] = threading.current_thread()
        return [1.0] * len(rows)

    here = Fixed(f)
    here.calling_thread = True  # type: ignore[attr-defined]
    RewardSet({"there": Fixed(g), "here": here})(batch())
    assert threads["here"] is threading.current_thread() is not threads["there"]


def test_rows_that_could_not_be_scored_from_outside_never_end_the_run(caplog):
    asked = []

    def down(rows: RewardBatch) -> list[Any]:
        asked.append(len(rows))
        raise Unscored("no answer from the server")

    result = RewardSet({"ok": Fixed([1] * 4), "mine": Fixed(down)})(batch())
    assert result.total == [1] * 4 and all(math.isnan(score) for score in result.components["mine"])
    assert result.errors == [f"reward.mine: row {i}: no answer from the server" for i in range(4)]
    assert caplog.messages == ["reward.mine: row 0: no answer from the server (4 of 4 rows have no such score)"]
    assert asked == [4]  # a server that is down is not asked again for every row
    mixed = RewardSet({"mine": Fixed([Unscored("slow"), "bad", "bad", "bad"])})(batch())
    assert len(mixed.errors) == 4  # not every row failed by a fault of the component


def test_all_parts_have_to_fail():
    def gather(value: Any) -> list[Any]:
        return [value, (2, [])]

    result = RewardSet({"mine": Fixed(["bad"] * 4)})(batch(), gather)
    assert len(result.errors) == 4
