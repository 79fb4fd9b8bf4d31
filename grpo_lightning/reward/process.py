"""`reward=process`: the completion is cut into steps, and a rule says for each whether it is right."""

import re
from collections.abc import Callable
from typing import Any

from grpo_lightning.errors import UsageError
from grpo_lightning.reward.function import call, locate_function
from grpo_lightning.reward.score import RewardBatch, Step, mean_rewards

ARITHMETIC_DELIMITER = ",|</think>"
_SUM = re.compile(r"([0-9]+)\s*\+\s*([0-9]+)\s*=")
_LONG = re.compile(r"([0-9]{1,9}(?:\+[0-9]{1,9})+)=([0-9]{1,9})")


class Steps:
    """Where the steps of a completion end: behind every delimiter that has text before it, and at the text's end.

    delimiter: a regular expression; a dot matches line ends too. The delimiter belongs to the step before it.
    split: instead of it the dotted path of a function `split(completion) -> list[int]`: the position behind each step.
    option: the name of what has these two, for error messages. default: the delimiter where neither is given.
    """

    def __init__(
        self,
        delimiter: str | None,
        split: str | Callable[[str], list[int]] | None,
        option: str,
        default: str | None = None,
    ):
        delimiter = default if delimiter is None and split is None else delimiter
        if (delimiter is None) == (split is None):
            raise UsageError(f"{option}: one of delimiter (a regular expression) and split (a function) is needed")
        self._function = locate_function(split, f"{option}.split") if isinstance(split, str) else split
        try:
            self._delimiter = re.compile(delimiter or "", re.DOTALL)
        except (re.error, TypeError) as error:
            raise UsageError(f"{option}.delimiter {delimiter!r} is no regular expression: {error}") from None

    def ends(self, completion: str) -> list[int]:
        """In order. Raises ValueError if the splitting function gives anything but growing positions in the text."""
        ends = [0]
        if self._function is not None:
            for end in self._function(completion):
                if not ends[-1] < end <= len(completion):
                    raise ValueError(f"the splitting function gave the end {end} behind {ends[-1]}")
                ends.append(end)
            return ends[1:]
        for found in self._delimiter.finditer(completion):
            if completion[ends[-1] : found.start()].strip():
                ends.append(found.end())
        return ends[1:] + [len(completion)] * bool(completion[ends[-1] :].strip())


class Process:
    """Scores every step; the completion's score is the mean of its steps' scores, none without a step.

    delimiter, split: where steps end (see Steps). For the arithmetic checker they may be left out.
    check: "arithmetic", or the dotted path of `f(prompt, steps, answer, **columns) -> list[float | None]` with
        a number, or None for no verdict, per step. `steps` are the texts, which together make the completion. It gets
        only what its signature names.
    """

    def __init__(
        self,
        delimiter: str | None = None,
        split: str | Callable[[str], list[int]] | None = None,
        check: str | Callable[..., list[float | None]] = "arithmetic",
        weight: float = 1.0,
        correctness: bool = False,
    ):
        self.check: Callable[..., list[float | None]]
        if check == "arithmetic":
            self.check = arithmetic
        else:
            self.check = locate_function(check, "reward.process.check") if isinstance(check, str) else check
        default = ARITHMETIC_DELIMITER if check == "arithmetic" else None
        self.cut = Steps(delimiter, split, "reward.process", default)
        self.name = str(getattr(self.check, "__name__", check))
        self.weight = weight
        self.correctness = correctness

    def __call__(self, batch: RewardBatch) -> list[float | None]:
        return mean_rewards(self.steps(batch))

    def steps(self, batch: RewardBatch) -> list[list[Step] | None]:
        return [self._steps(batch, i) for i in range(len(batch))]

    def _steps(self, batch: RewardBatch, i: int) -> list[Step]:
        completion = batch.completions[i]
        ends = self.cut.ends(completion)
        texts = [completion[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        columns: dict[str, Any] = {name: column[i] for name, column in batch.columns.items()}
        offered = {**columns, "prompt": batch.prompts[i], "steps": texts, "answer": batch.answers[i]}
        rewards = list(call(self.check, self.name, offered))
        if len(rewards) != len(ends):
            raise ValueError(f"{self.name} gave {len(rewards)} rewards for {len(ends)} steps")
        return [Step(end, reward) for end, reward in zip(ends, rewards, strict=True)]


def arithmetic(prompt: str, steps: list[str]) -> list[float | None]:
    """1 for a right step of `347+285=` and 0 for a wrong one: the columns from the right while thinking, then the sum.

    A column is the sum of its digits and the carry (`13`), or with the terms in any order (`4+8+1=13`), on its own
    merits: what the columns before it came to does not matter. Of the rest only the last step can be right, by being
    the sum; dots behind it do not count.
    """
    question = _SUM.findall(prompt)
    if not question:
        raise UsageError(f"reward.process.check=arithmetic wants prompts such as '347+285=', got {prompt!r:.80}")
    a, b = question[-1]
    columns = _columns(a, b)
    thinking, seen = prompt.rstrip().endswith("<think>"), 0
    rewards: list[float | None] = []
    for number, step in enumerate(steps):
        text = step.strip().removesuffix(",")
        if not number and text.startswith("<think>"):
            thinking, text = True, text.removeprefix("<think>")
        if thinking:
            thinking = not text.endswith("</think>")
            right = seen < len(columns) and _column_is(text.removesuffix("</think>").strip(), columns[seen])
            seen += 1
        else:
            written = text.rstrip(". ")
            right = number == len(steps) - 1 and _whole(written) and int(written) == int(a) + int(b)
        rewards.append(float(right))
    return rewards


def _columns(a: str, b: str) -> list[list[int]]:
    """The terms of each column from the right: two digits, and 1 for a carry."""
    width, carry, columns = max(len(a), len(b)), 0, []
    for x, y in zip(reversed(a.zfill(width)), reversed(b.zfill(width)), strict=True):
        columns.append([int(x), int(y)] + [1] * carry)
        carry = int(sum(columns[-1]) >= 10)
    return columns


def _column_is(text: str, terms: list[int]) -> bool:
    if long := _LONG.fullmatch(text):
        return sorted(int(term) for term in long[1].split("+")) == sorted(terms) and int(long[2]) == sum(terms)
    return _whole(text) and int(text) == sum(terms)


def _whole(text: str) -> bool:
    return re.fullmatch("[0-9]{1,100}", text) is not None
