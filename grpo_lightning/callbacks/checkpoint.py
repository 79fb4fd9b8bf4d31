"""Checkpoint: resumable checkpoints at rollout ends, where the buffer is used up and nothing is half done."""

import lightning as L

from grpo_lightning.run_folder import RunFolder


class Checkpoint(L.Callback):
    """Saves after every `every`-th rollout and after the last, and keeps the newest `keep`."""

    def __init__(self, folder: RunFolder, *, every: int, keep: int) -> None:
        self.folder, self.every, self.keep = folder, every, keep

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        rollout = trainer.current_epoch + 1
        if rollout % self.every and rollout != trainer.max_epochs:
            return
        path = self.folder.checkpoints / f"rollout={rollout:06d}.ckpt"
        beside = path.with_suffix(".part")
        trainer.save_checkpoint(beside)
        beside.replace(path)  # in one step: a checkpoint that was cut off never has a checkpoint's name
        for old in self.folder.all_checkpoints()[: -self.keep]:
            old.unlink()
