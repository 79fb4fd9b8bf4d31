"""`reward=random`: a placebo that pays 1 at a chosen rate, whatever was written."""

import hashlib
from dataclasses import dataclass

from grpo_lightning.errors import UsageError
from grpo_lightning.reward.score import RewardBatch


@dataclass(frozen=True)
class Random:
    """1 with probability `rate`, drawn from (seed, key of the completion): the same on any number of processes.

    Raises UsageError if `rate` is not in [0, 1].
    """

    rate: float = 0.5
    seed: int = 0
    weight: float = 1.0
    correctness: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.rate, bool) or not isinstance(self.rate, int | float) or not 0 <= self.rate <= 1:
            raise UsageError(f"reward.random.rate must be a number from 0 to 1, got {self.rate!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise UsageError(f"reward.random.seed must be a whole number, got {self.seed!r}")

    def __call__(self, batch: RewardBatch) -> list[float | None]:
        return [float(self._uniform(key) < self.rate) for key in batch.keys]

    def _uniform(self, key: tuple[int, ...]) -> float:
        text = ",".join(str(int(part)) for part in (self.seed, *key))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) / 2**48
