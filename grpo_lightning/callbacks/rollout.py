"""RolloutCallback: one Lightning epoch is one exploration. It fills the buffer before the epoch's optimiser steps."""

import logging
import re
from typing import Any

import lightning as L

from grpo_lightning.errors import RunError
from grpo_lightning.module import GRPOModule
from grpo_lightning.rollout.collect import Collector
from grpo_lightning.rollout.groups import Rollout
from grpo_lightning.run_folder import RunFolder

log = logging.getLogger(__name__)


class RolloutCallback(L.Callback):
    """Synchronises the engine with the policy, collects a rollout, fills the module's buffer, writes the rollout file.

    With `ahead`, the next rollout is generated while the policy is updated on this one.
    `rollout` is the newest rollout; `tokens_generated` counts over the run.
    """

    def __init__(self, collector: Collector, folder: RunFolder, ahead: bool = False) -> None:
        self.collector, self.folder, self.ahead = collector, folder, ahead
        self.rollout: Rollout | None = None
        self.tokens_generated = 0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        number = trainer.current_epoch + 1
        with pl_module.clock("sync"):
            self.collector.engine.sync(pl_module.policy, trainer.global_step)
        with trainer.precision_plugin.forward_context():  # the sampler computes as the trainer does
            rollout = self.collector.collect(number)
        self.collector.engine.sleep()
        for message in _together(rollout.errors):
            log.warning("rollout %d: %s", number, message)
        for name in self.collector.rewards.components:
            if rollout.metrics[f"reward/{name}/missing_fraction"] == 1:
                log.warning("rollout %d: reward.%s gave no score (None or NaN) for any completion", number, name)
        self.rollout = rollout
        self.tokens_generated += rollout.tokens_generated
        pl_module.buffer.fill(rollout.rows, number)
        pl_module.rollout_metrics = {"rollout": number, "rollout/tokens": rollout.tokens_generated, **rollout.metrics}
        self.folder.start_writing_rows(self.folder.rollouts, number, rollout.records)  # while the policy is updated
        if rollout.groups and not any(row.advantage is not None and row.advantage.any() for row in rollout.rows):
            log.warning("rollout %d: every advantage is 0, so nothing is learnt from its rewards", number)
        if not rollout.groups:
            log.warning("rollout %d: no group has varied rewards, so there is no optimiser step", number)
        if self.ahead and number != trainer.max_epochs:
            pl_module.keep_weights()
            self.collector.start_ahead(number + 1)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        # Before the last row of the rollout in metrics.csv and its checkpoint: where those are, its file is too.
        self.folder.finish_writing()
        self.collector.finish_ahead()
        pl_module.end_rollout()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        try:
            self.folder.finish_writing()
        except RunError as error:  # the run ends for another reason already
            log.error("%s", error)

    def state_dict(self) -> dict[str, Any]:
        return {"collector": self.collector.state_dict(), "tokens_generated": self.tokens_generated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.collector.load_state_dict(state_dict["collector"])
        self.tokens_generated = state_dict["tokens_generated"]


def _together(messages: list[str]) -> list[str]:
    """One line for what was said of several rows: "reward.x: row 3: late" ten times is "reward.x: 10 rows: late"."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for message in messages:
        found = re.fullmatch(r"(.*?: )row \d+: (.*)", message, re.DOTALL)
        kinds.setdefault((found[1], found[2]) if found else (message, ""), []).append(message)
    return [
        group[0] if len(group) == 1 or not what else f"{where}{len(group)} rows: {what}"
        for (where, what), group in kinds.items()
    ]
