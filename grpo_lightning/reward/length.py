"""`reward=length` pays short right answers more, `reward=repetition` takes off for repetitions. Both count tokens."""

import math
from dataclasses import dataclass
from typing import Any

from grpo_lightning.errors import UsageError
from grpo_lightning.reward.score import Component, RewardBatch, check_wrapped, wrapped_values


@dataclass(frozen=True)
class Cosine:
    """long + (short - long) / 2 * (1 + cos(pi * min(n, max_length) / max_length)) for a completion of n tokens.

    `short` and `long` are `right_short` and `right_long` where `of` gives at least 1, else `wrong_short` and
    `wrong_long`: the value falls or rises along half a cosine from one to the other. No score where `of` has none.

    Source: Demystifying Long Chain-of-Thought Reasoning in LLMs (arXiv 2502.03373), section 4; the values are those of
    TRL's `get_cosine_scaled_reward`, whose min_value_wrong is `wrong_short` and max_value_wrong `wrong_long`.
    """

    of: Component
    max_length: int
    right_short: float = 1.0
    right_long: float = 0.5
    wrong_short: float = -1.0
    wrong_long: float = -0.5
    weight: float = 1.0
    correctness: bool = False

    def __post_init__(self) -> None:
        check_wrapped("length.of", self.of)
        if isinstance(self.max_length, bool) or not isinstance(self.max_length, int) or self.max_length < 1:
            raise UsageError(f"reward.length.max_length must be a whole number from 1, got {self.max_length!r}")
        for option in ("right_short", "right_long", "wrong_short", "wrong_long"):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise UsageError(f"reward.length.{option} must be a finite number, got {value!r}")

    @property
    def calling_thread(self) -> bool:
        return getattr(self.of, "calling_thread", False)

    @property
    def by_row(self) -> bool:
        return getattr(self.of, "by_row", False)

    def __call__(self, batch: RewardBatch) -> list[Any]:
        scores = wrapped_values("length.of", self.of, batch)
        return [self._value(score, len(ids)) for score, ids in zip(scores, batch.completion_ids, strict=True)]

    def _value(self, score: Any, length: int) -> Any:
        if score is None or isinstance(score, Exception):
            return score
        short, long = (self.right_short, self.right_long) if score >= 1 else (self.wrong_short, self.wrong_long)
        return long + (short - long) / 2 * (1 + math.cos(math.pi * min(length / self.max_length, 1)))

    def close(self) -> None:
        if hasattr(self.of, "close"):
            self.of.close()


@dataclass(frozen=True)
class Repetition:
    """max_penalty * (1 - different n-grams / all n-grams) of the completion's tokens; 0 if shorter than `ngram`.

    Source: Demystifying Long Chain-of-Thought Reasoning in LLMs (arXiv 2502.03373), appendix C.2, as TRL's
    `get_repetition_penalty_reward` has it, here over tokens instead of words.
    """

    ngram: int = 3
    max_penalty: float = -1.0
    weight: float = 1.0
    correctness: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.ngram, bool) or not isinstance(self.ngram, int) or self.ngram < 1:
            raise UsageError(f"reward.repetition.ngram must be a whole number from 1, got {self.ngram!r}")
        penalty = self.max_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not -math.inf < penalty <= 0:
            raise UsageError(f"reward.repetition.max_penalty must be a number of at most 0, got {penalty!r}")

    def __call__(self, batch: RewardBatch) -> list[float | None]:
        return [self._penalty(ids) for ids in batch.completion_ids]

    def _penalty(self, ids: list[int]) -> float:
        grams = [tuple(ids[i : i + self.ngram]) for i in range(len(ids) - self.ngram + 1)]
        repeated = len(grams) - len(set(grams))
        return self.max_penalty * repeated / len(grams) if repeated else 0.0
