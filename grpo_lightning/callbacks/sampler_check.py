"""SamplerCheck: says so when the engine does not sample from the policy that is trained."""

import logging
import math
from typing import Any

import lightning as L

from grpo_lightning.module import GRPOModule

log = logging.getLogger(__name__)

METRIC = "sampler/logp_gap_mean"


class SamplerCheck(L.Callback):
    """Warns once per cause when engine and trainer disagree about the log-probabilities of what was sampled.

    The limits on the mean gap leave a factor of about ten to what rounding does. In float32 the engines of this package
    stay below 1e-3 on the worst token. bfloat16 keeps 8 bits, so that a logit near 10 is off by up to 0.03; means
    around 1e-2 are usual there. Stale weights or another temperature move the mean further after a few steps.

    Args:
        precision: of the trainer, as in trainer.precision.
    """

    def __init__(self, precision: str | int) -> None:
        self.precision = precision
        self.limit = 1e-2 if str(precision).startswith(("32", "64")) else 1e-1
        self._agreed = False  # in a whole earlier rollout of this process
        self._largest: float | None = None  # gap of the steps of this rollout
        self._said: set[str] = set()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, GRPOModule)
        gap = pl_module.step_metrics.get(METRIC, math.nan)
        if math.isnan(gap):  # no optimiser step, or one that cannot tell (update.old_logp=sampler)
            return
        self._largest = max(gap, self._largest or 0.0)
        if gap > self.limit:
            self._warn(trainer.current_epoch + 1, gap)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._agreed |= self._largest is not None and self._largest <= self.limit
        self._largest = None

    def _warn(self, rollout: int, gap: float) -> None:
        if self._agreed:
            cause = (
                "it was small in earlier rollouts, so the engine most likely samples from stale weights: "
                "look at how the weights are synchronised; a correction does not mend that"
            )
        else:
            cause = (
                "it is large from the first rollout on, so the engine most likely does not compute what the trainer "
                "does: look at its weights (model.path), dtype, rollout.temperature, and whether its log-probabilities "
                "are those of the processed logits; correction=tis is for differences of precision alone"
            )
        if cause not in self._said:
            self._said.add(cause)
            log.warning(
                "rollout %d: %s is %.2g, above %g at precision %s; %s",
                rollout, METRIC, gap, self.limit, self.precision, cause,
            )  # fmt: skip
