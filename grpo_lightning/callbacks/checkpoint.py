"""Checkpoint: resumable checkpoints at rollout ends, where the buffer is used up and nothing is half done."""

import json
import logging
import math
import pickle
import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch

from grpo_lightning.callbacks.stop import Stop, StopRequest
from grpo_lightning.distributed import gather, rank
from grpo_lightning.errors import RunError, UsageError
from grpo_lightning.module import GRPOModule
from grpo_lightning.run_folder import RunFolder

log = logging.getLogger(__name__)


class Checkpoint(L.Callback):
    """Saves after every `every`-th rollout and after the last, and keeps the newest `keep`.

    With `best`, the name of a validation metric, it also keeps best.ckpt, of the rollout with the highest value.

    It is the last of the callbacks, and ends the run where `stop` was asked to. Until the first optimiser step of a
    rollout the weights are still those of the rollout end before; with the rest of the state as it was there, which is
    remembered, they make the checkpoint of that rollout end. From then on the run stops at the next rollout end.
    """

    def __init__(self, folder: RunFolder, stop: StopRequest, *, every: int, keep: int, best: str | None = None) -> None:
        self.folder, self.stop, self.every, self.keep, self.best = folder, stop, every, keep, best
        self._best_value = -math.inf
        self._unsaved: tuple[int, bytes] | None = None  # the newest rollout end, unless it is on disk: its state

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        record = self.folder.checkpoints / "best.json"
        # One that a stopped run wrote after the rollout this run goes on from will be written again.
        if record.exists() and (written := json.loads(record.read_text()))["rollout"] <= trainer.current_epoch:
            self._best_value = written.get(self.best, -math.inf)
        if not self.folder.all_checkpoints():
            self._unsaved = 0, _pickled(_state(trainer, pl_module))
        if self.stop.agreed():
            raise Stop

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.stop.at_once = False  # before it is asked, so that no signal is lost in between
        if self.stop.agreed():
            raise Stop
        self._unsaved = None

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        rollout, last = trainer.current_epoch + 1, trainer.current_epoch + 1 == trainer.max_epochs
        stop = self.stop.agreed()
        with pl_module.clock("checkpoint"):
            state = _state(trainer, pl_module)
            value = pl_module.rollout_metrics.get(self.best, math.nan) if self.best else math.nan
            if self.best and value > self._best_value:
                self._best_value = value
                self._write(trainer, pl_module, self.folder.checkpoints / "best.ckpt", state)
                self.folder.write_best({"rollout": rollout, self.best: value})
            if last or stop or rollout % self.every == 0:
                self._save(trainer, pl_module, rollout, state)
            else:
                self._unsaved = rollout, _pickled(state)
        if stop and not last:
            raise Stop
        self.stop.at_once = True

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Stop) and not self.stop.twice and self._unsaved is not None:
            rollout, state = self._unsaved
            self._save(trainer, pl_module, rollout, pickle.loads(state))
            self.folder.remove_rollouts_after(rollout)

    def _save(self, trainer: L.Trainer, module: L.LightningModule, rollout: int, state: dict[str, Any]) -> None:
        self._unsaved = None
        self._write(trainer, module, self.folder.checkpoint_of(rollout), state)
        if rank() == 0:
            for old in self.folder.all_checkpoints()[: -self.keep]:
                old.unlink()

    def _write(self, trainer: L.Trainer, module: L.LightningModule, path: Path, state: dict[str, Any]) -> None:
        """Put weights and optimiser to the state, with all processes, and write it down."""
        checkpoint: dict[str, Any] = {
            "state_dict": trainer.strategy.lightning_module_state_dict(),
            "optimizer_states": [trainer.strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers],
            "lr_schedulers": [],
        }
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            callback.on_save_checkpoint(trainer, module, checkpoint)
        module.on_save_checkpoint(checkpoint)
        self.folder.write_checkpoint(path, checkpoint | state)
        trainer.strategy.barrier()


def _state(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
    """What a checkpoint holds beside weights and optimiser. Taken by all processes together."""
    states = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}  # type: ignore[attr-defined]
    state: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": L.__version__,
        "loops": {"fit_loop": trainer.fit_loop.state_dict()},
        "callbacks": {key: value for key, value in states.items() if value},
        "state_dict": {},
    }
    module.on_save_checkpoint(state)
    del state["state_dict"]
    return state


def _pickled(state: dict[str, Any]) -> bytes:
    """As it is now: much of it will change in place."""
    return pickle.dumps(state)


class RandomStates(L.Callback):
    """The states of all random number generators, of every process. It stands before whatever may draw from them."""

    def __init__(self) -> None:
        self._loaded: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return {"ranks": gather(state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict["ranks"]

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._loaded:
            return
        # Only now: what was built until here has drawn numbers that a run in one piece had not. Where there are more
        # processes than before, the states go round.
        state, self._loaded = self._loaded[rank() % len(self._loaded)], []
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_available() and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])


def newest_readable(folder: RunFolder, module: L.LightningModule) -> tuple[Path, int]:
    """The newest checkpoint of `folder` that is whole, and its optimiser step.

    Raises:
        RunError: none can be read.
        UsageError: it is not a checkpoint of this model or of this configuration.
    """
    for path in reversed(folder.all_checkpoints()):
        try:
            checkpoint = torch.load(path, map_location="cpu", weights_only=False)
        except Exception as error:
            log.warning("%s cannot be read (%s); trying the one before", path, _first_line(error))
            continue
        folder.check_same(checkpoint["config"], path)
        _check_shapes(path, checkpoint["state_dict"], module)
        return path, checkpoint["global_step"]
    raise RunError(
        f"no checkpoint in {folder.checkpoints} can be read, so the run cannot go on; nothing was changed: "
        "put back a whole one, or start a new run in another hydra.run.dir"
    )


def _check_shapes(path: Path, saved: dict[str, torch.Tensor], module: L.LightningModule) -> None:
    own = module.state_dict()
    names = [*saved, *(own if module.strict_loading else ())]
    for name in names:
        there, here = (list(tensors[name].shape) if name in tensors else "absent" for tensors in (saved, own))
        if there != here:
            raise UsageError(
                f"model.path: {path} is a checkpoint of another model: {name} is {there} there and {here} in this "
                "one; resume with the model it was trained with"
            )


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
