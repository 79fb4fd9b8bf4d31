"""EvaluationCallback: held-out accuracy before, during and after training, kept apart from the training metrics."""

from collections.abc import Callable
from typing import Any

import lightning as L

from grpo_lightning.evaluation import Evaluation
from grpo_lightning.module import GRPOModule
from grpo_lightning.rollout.engine import Engine
from grpo_lightning.run_folder import RunFolder


class EvaluationCallback(L.Callback):
    """Runs `run_evaluation` before the first rollout, after every `every`-th and after the last.

    `start` and `last` are the metrics of the first and the newest evaluation, which came after `rollout`; `samples`
    are the newest records.
    """

    def __init__(
        self, engine: Engine, run_evaluation: Callable[[], Evaluation], *, every: int, folder: RunFolder
    ) -> None:
        self.engine, self.run_evaluation, self.every, self.folder = engine, run_evaluation, every, folder
        self.start: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.rollout = 0
        self.samples: list[dict[str, Any]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.start:  # a resumed run has it from its checkpoint
            self.start = self._evaluate(trainer, pl_module, 0)
            for logger in trainer.loggers:
                logger.log_metrics(self.start, step=0)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        rollout = trainer.current_epoch + 1
        if rollout % self.every == 0 or rollout == trainer.max_epochs:
            metrics = self._evaluate(trainer, pl_module, rollout)
            pl_module.rollout_metrics |= metrics
            # For callbacks of the user that monitor, such as ModelCheckpoint(monitor="val/accuracy").
            pl_module.log_dict(metrics, logger=False)

    def _evaluate(self, trainer: L.Trainer, pl_module: L.LightningModule, rollout: int) -> dict[str, float]:
        assert isinstance(pl_module, GRPOModule)
        with pl_module.clock("sync"):
            self.engine.sync(pl_module.policy, trainer.global_step)
        with pl_module.clock("validate"), trainer.precision_plugin.forward_context():
            evaluation = self.run_evaluation()
        self.engine.sleep()
        self.last, self.samples, self.rollout = evaluation.metrics, evaluation.records, rollout
        self.folder.write_rows(self.folder.validation, rollout, evaluation.records)
        return evaluation.metrics

    def state_dict(self) -> dict[str, Any]:
        return {"start": self.start, "last": self.last, "rollout": self.rollout}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.start, self.last, self.rollout = state_dict["start"], state_dict["last"], state_dict["rollout"]
