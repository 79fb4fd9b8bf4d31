"""`reward=noisy`: another reward whose verdicts are wrong at known rates."""

from dataclasses import dataclass
from typing import Any

from grpo_lightning.reward.random import check_rate, check_seed, uniform
from grpo_lightning.reward.score import Component, RewardBatch, check_wrapped, wrapped_values


@dataclass(frozen=True)
class Noisy:
    """A score of at least 1 becomes 0 with probability `false_negative`, one below 1 becomes 1 with `false_positive`.

    Other rows keep what `of` gives, also no score. Which rows flip follows from (seed, key of the completion): the
    same on any number of processes, and for both rates from the same draw, so that higher rates flip more rows and
    never fewer.

    Raises UsageError if a rate is not in [0, 1] or `of` is no reward component.
    """

    of: Component
    false_positive: float = 0.1
    false_negative: float = 0.1
    seed: int = 0
    weight: float = 1.0
    correctness: bool = True

    def __post_init__(self) -> None:
        check_wrapped("noisy.of", self.of)
        check_rate("reward.noisy.false_positive", self.false_positive)
        check_rate("reward.noisy.false_negative", self.false_negative)
        check_seed("reward.noisy.seed", self.seed)

    @property
    def calling_thread(self) -> bool:
        return getattr(self.of, "calling_thread", False)

    @property
    def by_row(self) -> bool:
        return getattr(self.of, "by_row", False)

    def __call__(self, batch: RewardBatch) -> list[Any]:
        scores = wrapped_values("noisy.of", self.of, batch)
        return [self._flip(score, key) for score, key in zip(scores, batch.keys, strict=True)]

    def _flip(self, score: Any, key: tuple[int, ...]) -> Any:
        if score is None or isinstance(score, Exception):
            return score
        drawn = uniform(self.seed, key, "noisy")  # apart from what reward=random draws
        if score >= 1:
            return 0.0 if drawn < self.false_negative else score
        return 1.0 if drawn < self.false_positive else score

    def close(self) -> None:
        if hasattr(self.of, "close"):
            self.of.close()
