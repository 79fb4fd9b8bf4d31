"""What the micro-batches of one optimiser step add up to, over all processes."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from grpo_lightning import distributed

Number = Tensor | float


class Sums:
    """The loss, metrics as (sum, count) and maxima of a step. Every process must take the same names."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.totals: dict[str, tuple[float, float]] = {}
        self.maxima: dict[str, float] = {}

    def take(
        self, loss: Number, metrics: Mapping[str, tuple[Number, Number]], maxima: Mapping[str, Number], counts: bool
    ) -> None:
        """Add those of one micro-batch; one that does not count leaves its names alone."""
        self.loss += float(loss) * counts
        for name, (total, count) in metrics.items():
            before = self.totals.get(name, (0.0, 0.0))
            self.totals[name] = (before[0] + float(total), before[1] + float(count)) if counts else before
        for name, value in maxima.items():
            before_max = self.maxima.get(name, -math.inf)
            # NaN, where the value is not known, does not survive a maximum over processes; nothing is below -inf.
            known = counts and not math.isnan(float(value))
            self.maxima[name] = max(float(value), before_max) if known else before_max

    def over_processes(self, device: torch.device) -> dict[str, float]:
        """name -> value, the sums divided by their counts (NaN where there is nothing to divide), and "policy/loss"."""
        names = list(self.totals)
        pairs = [number for name in names for number in self.totals[name]]
        added = distributed.add(torch.tensor([self.loss, *pairs], dtype=torch.float64), device).tolist()
        largest = distributed.largest(torch.tensor(list(self.maxima.values()), dtype=torch.float64), device).tolist()
        means = {
            name: total / count if count else math.nan
            for name, total, count in zip(names, added[1::2], added[2::2], strict=True)
        }
        maxima = {k: v if v > -math.inf else math.nan for k, v in zip(self.maxima, largest, strict=True)}
        return {"policy/loss": added[0], **means, **maxima}
