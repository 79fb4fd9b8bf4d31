"""overlong: what happens to long and to truncated completions."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lightning.objective.checks import check_bool, check_number
from grpo_lightning.objective.groups import exact_dtype


@dataclass(frozen=True)
class NoPunishment:
    """r_i stays as it is.

    drop_truncated: truncated rows leave the loss (not the group's statistics).
    Source: DAPO (arXiv 2503.14476), section 3.4, overlong filtering.
    """

    punishes: ClassVar[bool] = False
    drop_truncated: bool = False

    def __post_init__(self) -> None:
        check_bool("overlong.drop_truncated", self.drop_truncated)

    def __call__(self, lengths: Tensor) -> Tensor:
        """lengths [N] int -> what is added to the rewards [N]: zeros."""
        return torch.zeros(lengths.shape, device=lengths.device)


@dataclass(frozen=True)
class SoftPunishment:
    """r_i += 0 if n <= max_length - cache;  (max_length - cache - n) / cache if n <= max_length;  else -1.

    n: tokens of the row, padding not counted. Source: DAPO (arXiv 2503.14476), eq. 13 (max_length 20480, cache 4096).

    max_length: > 0, in tokens; None is an error when a punishment is wanted.
    cache: in [0, max_length] tokens; None is a fifth of max_length, as in the paper.
    drop_truncated: truncated rows leave the loss as well.
    """

    name: ClassVar[str] = "soft"
    max_length: float | None = None
    cache: float | None = None
    drop_truncated: bool = False

    def __post_init__(self) -> None:
        if self.max_length is not None:
            check_number("overlong.max_length", self.max_length, "(0, inf)")
        if self.cache is not None:
            limit = "inf)" if self.max_length is None else f"{self.max_length}]"
            check_number("overlong.cache", self.cache, f"[0, {limit}")
        elif self.max_length is not None:
            object.__setattr__(self, "cache", self.max_length / 5)
        check_bool("overlong.drop_truncated", self.drop_truncated)

    def __call__(self, lengths: Tensor) -> Tensor:
        """lengths [N] int: completion tokens without padding -> what is added to the rewards [N], in [-1, 0]."""
        if self.max_length is None:
            raise ValueError("overlong=soft needs overlong.max_length, the longest completion in tokens")
        assert self.cache is not None
        over = lengths.to(exact_dtype(lengths.device)) - (self.max_length - self.cache)
        inside = torch.zeros_like(over) if self.cache == 0 else -(over / self.cache).clamp(min=0)
        return torch.where(lengths > self.max_length, -1.0, inside)
