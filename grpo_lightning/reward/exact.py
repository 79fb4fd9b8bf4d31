"""`reward=exact`: 1 for the right final answer, 0 for a wrong one, no score without a reference answer."""

import re
from dataclasses import dataclass

from grpo_lightning.errors import UsageError
from grpo_lightning.reward.answer import (
    Number,
    first_number,
    last_number,
    marked_answers,
    plain,
    visible,
    whole_number,
)
from grpo_lightning.reward.score import RewardBatch


@dataclass(frozen=True)
class Exact:
    r"""Compares the final answer with the reference: numbers as numbers, anything else as normalised text.

    The whole completion is searched, after `</think>` if there is thinking (thinking that never ends scores 0).
    The last marked answer counts: `\boxed{n}`, `<answer>n</answer>`, `#### n`, "The answer is n", "Answer: n".
    Without a mark the last number counts, or for a reference that is not a number the last line.
    `strict` accepts only the first three marks.

    1,234 = 1234 = 1234.0 = $1,234 = 1234 dollars; 0.75 = 3/4; 50% = 0.5 = 50. A whole reference wants the number
    itself: 48/2 is a task and not the answer 24.
    """

    weight: float = 1.0
    strict: bool = False
    correctness: bool = True

    def __post_init__(self) -> None:
        for option in ("strict", "correctness"):
            if not isinstance(getattr(self, option), bool):
                raise UsageError(f"reward.exact.{option} must be true or false, got {getattr(self, option)!r}")

    def __call__(self, batch: RewardBatch) -> list[float | None]:
        rows = zip(batch.prompts, batch.completions, batch.answers, strict=True)
        return [self._score(prompt, completion, answer) for prompt, completion, answer in rows]

    def _score(self, prompt: str, completion: str, answer: object) -> float | None:
        gold = gold_text(answer)
        if gold is None:
            return None
        text = visible(prompt, completion)
        if text is None:
            return 0.0
        number = whole_number(gold)
        if number is not None:
            return float(same_number(number, final_number(text, self.strict)))
        return float(normalised(gold) in final_texts(text, self.strict))


def gold_text(answer: object) -> str | None:
    r"""The reference answer without the worked solution before it (`... #### 72`, `\boxed{72}`); None if missing."""
    if answer is None or answer != answer or not str(answer).strip():
        return None
    text = str(answer).strip()
    return next((mark.text for mark in marked_answers(text) if mark.kind in ("boxed", "hash")), text)


def final_number(text: str, strict: bool) -> Number | None:
    """The number a completion answers with. The last `boxed` or `<answer>` decides even if it holds no number."""
    for mark in marked_answers(text):
        if mark.kind in ("boxed", "tag"):
            return whole_number(mark.text)
        # "#### Step 1" is a heading, "I hope this answer is helpful" no answer
        within = 0 if mark.kind == "hash" else 30
        if mark.kind == "hash" or not strict:
            number = first_number(mark.text[:200], within)
            if number is not None:
                return number
    return None if strict else last_number(text)


def final_texts(text: str, strict: bool) -> set[str]:
    """The normalised texts a completion may be said to answer with: the last mark's, cut at a sentence end or not."""
    for mark in marked_answers(text):
        if mark.kind != "phrase":
            return {normalised(mark.text)}
        if not strict:
            return {normalised(mark.text), normalised(re.split(r"[.!?]\s", mark.text)[0])}
    lines = [line for line in text.splitlines() if line.strip()]
    return {normalised(lines[-1])} if lines and not strict else set()


def normalised(text: str) -> str:
    return re.sub(r"\s+", " ", plain(text)).strip(" .\"'`*").casefold()


def same_number(gold: Number, answer: Number | None) -> bool:
    """Whole numbers exactly, others to a relative 1e-9 (binary floats in data files)."""
    if answer is None:
        return False
    whole = gold.value.denominator == 1
    values = [] if whole and answer.fraction else [answer.value]
    if gold.percent and not answer.percent:
        values.append(answer.value * 100)
    if answer.percent and not gold.percent:
        values.append(answer.value / 100)
    tolerance = 0 if whole else abs(gold.value) / 10**9
    return any(abs(gold.value - value) <= tolerance for value in values)
