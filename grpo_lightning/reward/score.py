"""Adds up reward components by name and weight, and keeps their faults visible.

Every completion is scored by every component. A component may give no score (None) for a row; such a row is left
out of that component only. What a component must not do silently (wrong number of scores, infinities, exceptions)
is reported with the component's name and the row. Components are scored at the same time, in threads.
"""

import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Protocol

from grpo_lightning.errors import RunError, UsageError

logger = logging.getLogger(__name__)


class Unscored(Exception):
    """A row could not be scored for a reason outside of this program (a server that does not answer, a time-out).

    Such rows have no score, are counted and reported, and never end a run.
    """


class Step(NamedTuple):
    """A step of a completion: the position in its text just behind the step, and the step's reward if there is one."""

    end: int
    reward: float | None


@dataclass(frozen=True)
class RewardBatch:
    """What reward components see: one entry per completion in every list.

    prompts, completions: text as the model read and wrote it (after the chat template).
    answers: the reference answers, None where there is none.
    columns: the other columns of the data, by name.
    completion_ids: the sampled token ids.
    group_ids: which completions answer the same draw of a prompt.
    keys: a unique key per completion that does not depend on the number of processes (`random` draws from it).
    finish_reasons: "stop" or "length", for instance.
    """

    prompts: list[str]
    completions: list[str]
    answers: list[Any]
    columns: dict[str, list[Any]] = field(default_factory=dict)
    completion_ids: list[list[int]] = field(default_factory=list)
    group_ids: list[int] = field(default_factory=list)
    keys: list[tuple[int, ...]] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.completions)

    def row(self, i: int) -> "RewardBatch":
        """The batch of completion i alone."""
        values: dict[str, Any] = {f.name: getattr(self, f.name)[i : i + 1] for f in fields(self) if f.name != "columns"}
        return RewardBatch(columns={name: column[i : i + 1] for name, column in self.columns.items()}, **values)


@dataclass(frozen=True)
class RewardResult:
    """One entry per completion.

    total: weighted sum of the scores there are; NaN where no component gave one.
    components: raw, unweighted scores by component; NaN for "no score".
    correct: whether every correctness component that gave a score gave at least 1; None where none did.
    errors: what went wrong, a line per row ("reward.mine: row 3: ValueError: ...").
    steps: the judged steps of every completion, None for one without; None where no component judges steps.
    """

    total: list[float]
    components: dict[str, list[float]]
    correct: list[bool | None]
    errors: list[str]
    steps: list[list[Step] | None] | None = None


class Component(Protocol):
    """A reward component: a weight, whether it judges correctness (or shapes), and a score or None per completion.

    One that judges steps has a method `steps(batch) -> list[list[Step] | None]` too; its scores are `mean_rewards` of
    them. One with `calling_thread = True` is not scored in a thread of its own.

    One with `by_row = True` is asked for some groups while others are still generated. That is for components whose
    score of a row depends on that row alone, and which spend their time waiting for other processes or the network.
    """

    @property
    def weight(self) -> float: ...

    @property
    def correctness(self) -> bool: ...

    def __call__(self, batch: RewardBatch) -> Any: ...


class RewardSet:
    """The components of `reward=[...]`.

    Raises UsageError if there is no component, if a weight is not a finite number, or if two components judge steps.
    """

    def __init__(self, components: Mapping[str, Component]):
        if not components:
            raise UsageError("reward: at least one component is needed, for example reward=exact")
        for name, component in components.items():
            check_component(name, component)
        self.components = dict(components)
        judges = [name for name, component in components.items() if hasattr(component, "steps")]
        if len(judges) > 1:
            raise UsageError(f"reward: {' and '.join(judges)} judge steps; only one component can")
        self._judge = judges[0] if judges else None
        self.by_row = [
            name
            for name, component in components.items()
            if getattr(component, "by_row", False) and not getattr(component, "calling_thread", False)
        ]

    @property
    def judges_steps(self) -> bool:
        """Whether a component scores steps."""
        return self._judge is not None

    @property
    def has_correctness(self) -> bool:
        return any(component.correctness for component in self.components.values())

    def __call__(
        self,
        batch: RewardBatch,
        gather: Callable[[Any], list[Any]] = lambda value: [value],
        known: Mapping[str, "list[Verdict]"] | None = None,
    ) -> RewardResult:
        """Score a batch. Raises RunError if a component gives the wrong number of scores or fails on every row.

        Where several processes score a part each, `gather` gives what all of them pass to it, so that it is every row
        of all parts that has to fail. Rows that are `Unscored` do not count as failed. Components in `known` have been
        asked before: what they said of every row of this batch.
        """
        asked = [name for name in self.components if name not in (known or {})]
        new = self._score_all(asked, batch) if len(batch) else {name: [] for name in asked}
        scored = {name: new[name] if name in new else (known or {})[name] for name in self.components}
        failed, unscored = (
            {name: _messages(name, verdicts, kind) for name, verdicts in scored.items()} for kind in (False, True)
        )
        for lines in failed.values():
            parts = gather((len(batch), lines))
            rows, messages = sum(size for size, _ in parts), [line for _, part in parts for line in part]
            if rows and len(messages) == rows:
                raise RunError(f"{messages[0]} (and no other of the {rows} rows could be scored)")
        errors = [line for name in scored for line in failed[name] + unscored[name]]
        for line in errors:
            logger.debug(line)
        for lines in unscored.values():
            if lines:
                logger.warning("%s (%d of %d rows have no such score)", lines[0], len(lines), len(batch))
        steps: list[list[Step] | None] | None = None
        scores: dict[str, list[float | None]] = {n: [v.value for v in verdicts] for n, verdicts in scored.items()}
        if self._judge is not None:
            steps = [verdict.value for verdict in scored[self._judge]]
            scores[self._judge] = mean_rewards(steps)
        total: list[float] = []
        correct: list[bool | None] = []
        for i in range(len(batch)):
            given = [(component, scores[name][i]) for name, component in self.components.items()]
            weighted = [component.weight * score for component, score in given if score is not None]
            judged = [score >= 1 for component, score in given if component.correctness and score is not None]
            total.append(sum(weighted) if weighted else math.nan)
            correct.append(all(judged) if judged else None)
        raw = {name: [math.nan if s is None else s for s in column] for name, column in scores.items()}
        return RewardResult(total, raw, correct, errors, steps)

    def score_by_row(self, batch: RewardBatch) -> dict[str, "list[Verdict]"]:
        """What the components with `by_row` say of every row of some whole groups."""
        return self._score_all(self.by_row, batch)

    def _score_all(self, names: list[str], batch: RewardBatch) -> dict[str, "list[Verdict]"]:
        """What each of these components says of every row, in the order of the components."""
        here = {name for name in names if getattr(self.components[name], "calling_thread", False)}
        with ThreadPoolExecutor(max(1, len(names))) as pool:
            started = {
                name: pool.submit(_score, name, self.components[name], batch) for name in names if name not in here
            }
            done = {name: _score(name, self.components[name], batch) for name in names if name in here}
            return {name: done[name] if name in here else started[name].result() for name in names}

    def close(self) -> None:
        """Release what components hold (worker processes)."""
        for component in self.components.values():
            close = getattr(component, "close", None)
            if close is not None:
                close()


def check_component(name: str, component: Any) -> None:
    if not callable(component) or not hasattr(component, "weight") or not hasattr(component, "correctness"):
        raise UsageError(
            f"reward.{name}: {type(component).__name__} is not a reward component "
            "(it needs `weight`, `correctness` and `__call__`); for a plain function use reward=function"
        )
    check_weight(name, component.weight)


def check_wrapped(name: str, component: Any) -> None:
    """Like `check_component`, for a component whose scores another one takes, so that its own weight has no effect."""
    check_component(name, component)
    if component.weight != 1:
        raise UsageError(f"reward.{name}.weight has no effect: set reward.{name.split('.')[0]}.weight")


def wrapped_values(name: str, component: Component, batch: RewardBatch) -> list[Any]:
    """The scores of a component that another one wraps; an exception for a row with a fault, to be passed on."""
    values = _as_list(name, component(batch), len(batch))
    cleaned = [(value, *_clean(value)) for value in values]
    return [
        score if problem is None else value if isinstance(value, Exception) else ValueError(problem)
        for value, score, problem in cleaned
    ]


def check_weight(name: str, weight: object) -> None:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise UsageError(f"reward.{name}.weight must be a finite number, got {weight!r}")


def mean_rewards(steps: list[list[Step] | None]) -> list[float | None]:
    """The mean of every row's step rewards; None for a row without any."""
    present = [[step.reward for step in row or [] if step.reward is not None] for row in steps]
    return [sum(row) / len(row) if row else None for row in present]


class Verdict(NamedTuple):
    """What a component said of a row: a clean score, or list of steps, or None; then what was wrong, if anything was,
    and whether the row is `Unscored`."""

    value: Any
    problem: str | None
    unscored: bool


def _messages(name: str, verdicts: "list[Verdict]", unscored: bool) -> list[str]:
    """A line for each row that a component failed on, or left unscored."""
    return [
        f"reward.{name}: row {i}: {verdict.problem}"
        for i, verdict in enumerate(verdicts)
        if verdict.problem and verdict.unscored == unscored
    ]


def _score(name: str, component: Component, batch: RewardBatch) -> list[Verdict]:
    call = getattr(component, "steps", component)
    try:
        values = _as_list(name, call(batch), len(batch))
    except (UsageError, RunError):
        raise
    except Unscored as error:
        values = [error] * len(batch)
    except Exception as error:
        logger.debug("reward.%s failed on the batch, trying row by row", name, exc_info=error)
        values = [_score_row(name, call, batch.row(i)) for i in range(len(batch))]
    verdicts = []
    for value, text in zip(values, batch.completions, strict=True):
        clean, problem = _clean_steps(value, len(text)) if hasattr(component, "steps") else _clean(value)
        verdicts.append(Verdict(clean, problem, isinstance(value, Unscored)))
    return verdicts


def _score_row(name: str, call: Callable[[RewardBatch], Any], row: RewardBatch) -> Any:
    """The single row's value, or the exception it raised (to be reported as that row's fault)."""
    try:
        return _as_list(name, call(row), 1)[0]
    except (UsageError, RunError):
        raise
    except Exception as error:
        return error


def _as_list(name: str, values: Any, length: int) -> list[Any]:
    if hasattr(values, "tolist"):  # numpy arrays, torch tensors, pandas series
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise RunError(f"reward.{name} must give a list of {length} numbers, got {type(values).__name__}")
    if len(values) != length:
        raise RunError(f"reward.{name} gave {len(values)} scores for {length} completions")
    return list(values)


def _clean(value: Any) -> tuple[float | None, str | None]:
    """(score or None, what is wrong with it or None)."""
    if value is None:
        return None, None
    if isinstance(value, Exception):
        return None, str(value) if isinstance(value, Unscored) else f"{type(value).__name__}: {value}"
    if hasattr(value, "item"):  # numpy scalars and one-element tensors
        value = value.item()
    if not isinstance(value, int | float):
        return None, f"the score {value!r} is not a number"
    if math.isnan(value):
        return None, None
    if math.isinf(value):
        return None, f"the score is {value}"
    return float(value), None


def _clean_steps(value: Any, length: int) -> tuple[list[Step] | None, str | None]:
    """(steps in order within a text of this length or None, what is wrong with them or None)."""
    if value is None or isinstance(value, Exception):
        return None, _clean(value)[1]
    try:
        given = [(int(end), reward) for end, reward in value]
    except (TypeError, ValueError):
        return None, f"{value!r:.200} is no list of steps"
    steps: list[Step] = []
    for end, reward in given:
        if not (steps[-1].end if steps else 0) < end <= length:
            return None, f"a step ends at {end}, behind {steps[-1].end if steps else 0} and within {length} is right"
        clean, problem = _clean(reward)
        if problem:
            return None, f"step {len(steps)}: {problem}"
        steps.append(Step(end, clean))
    return steps, None
