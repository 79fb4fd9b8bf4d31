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
        check_rate("reward.random.rate", self.rate)
        check_seed("reward.random.seed", self.seed)

    def __call__(self, batch: RewardBatch) -> list[float | None]:
        return [float(uniform(self.seed, key) < self.rate) for key in batch.keys]


def uniform(seed: int, key: tuple[int, ...], purpose: str = "") -> float:
    """A number from [0, 1) that follows from these three alone."""
    text = purpose + ",".join(str(int(part)) for part in (seed, *key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) / 2**48


def check_rate(option: str, rate: object) -> None:
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise UsageError(f"{option} must be a number from 0 to 1, got {rate!r}")


def check_seed(option: str, seed: object) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UsageError(f"{option} must be a whole number, got {seed!r}")
