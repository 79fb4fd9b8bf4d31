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
        trainer.save_checkpoint(self.folder.checkpoints / f"rollout={rollout:06d}.ckpt")
        for old in self.folder.all_checkpoints()[: -self.keep]:
            old.unlink()
