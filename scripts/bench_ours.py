"""Our side of the benchmarks: `python train.py` with imposed completion lengths, a step at a time when told to."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from torch import Tensor

from grpo_lightning.config import quote
from grpo_lightning.module import GRPOModule
from grpo_lightning.rollout.hf import HFEngine
from scripts.bench_common import ROOT, Child, Turns

NEVER = 10**6  # rollouts between validations and between checkpoints: none during the steps


class ImposedLengths(HFEngine):
    """rollout=hf whose completions have the lengths that are given, wherever the end of sequence was drawn.

    Args:
        lengths: of the rows of each rollout, in the order of requests and samples; the last ones serve for the rest.
    """

    def __init__(self, lengths: list[list[int]], max_rows: int = 256) -> None:
        super().__init__(max_rows)
        self.lengths = lengths

    def _ended(self, tokens: Tensor, rows: np.ndarray, position: int, eos: Tensor) -> np.ndarray:
        # One optimiser step a rollout: the version of the weights is the number of the rollout.
        imposed = self.lengths[min(self._version, len(self.lengths) - 1)]
        return np.array(imposed)[rows] == position + 1


class TurnsCallback(L.Callback):
    """A step is everything from the end of one optimiser step to the end of the next."""

    def __init__(self, pipe: int) -> None:
        self.turns = Turns(pipe)
        self._before: dict[str, float] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        self.turns.begin()
        self._before = {**pl_module.clock.total, **pl_module.clock.parts}

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, GRPOModule)
        now = {**pl_module.clock.total, **pl_module.clock.parts}
        phases = {name: seconds - self._before.get(name, 0.0) for name, seconds in now.items() if name != "validate"}
        rows = pl_module.buffer.minibatch(0)
        self.turns.end_step(phases=phases, lengths=[row.length for row in rows], prompts=[row.start for row in rows])
        self._before = now


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A number that depends on the tokens, so that hardly ever an advantage is 0, and costs nothing."""
    return [sum(ids) % 997 / 997 for ids in completion_ids]


def overrides(
    model: str, folder: Path, lengths: Sequence[Sequence[int]], *, prompts: int, group_size: int, beta: float, lr: float
) -> list[str]:
    """The options of the run, as a user would type them.

    Args:
        folder: with the prompts; the run writes into it. lengths: of the completions of each rollout.
    """
    assert all(len(some) == prompts * group_size for some in lengths), Counter(map(len, lengths))
    return [
        f"model={model}", "trainer=cpu", "logger=none", f"trainer.max_epochs={len(lengths)}",
        "data=file", f"data.path={quote(str(folder / 'train.jsonl'))}",
        f"data.val_path={quote(str(folder / 'val.jsonl'))}",
        "rollout=hf", f"rollout.prompts={prompts}", f"rollout.group_size={group_size}", "rollout.temperature=1",
        f"rollout.max_new_tokens={max(map(max, lengths))}",
        "rollout.engine._target_=scripts.bench_ours.ImposedLengths",
        f"+rollout.engine.lengths={json.dumps([list(some) for some in lengths])}",
        "reward=[function]", "reward.function.path=scripts.bench_ours.reward", "eval.reward=[exact]",
        "eval.prompts=1", "eval.samples=1", f"eval.every={NEVER}", f"checkpoint.every={NEVER}",
        f"kl.beta={beta}" if beta else "kl=none", f"optimizer.lr={lr}",
        f"hydra.run.dir={quote(str(folder / 'run'))}",
    ]  # fmt: skip


def start(name: str, options: list[str], threads: int) -> Child:
    """`python train.py` with these options, as a child that takes a step when it is asked to."""
    turns = ["+callbacks.turns._target_=scripts.bench_ours.TurnsCallback", "+callbacks.turns.pipe="]
    return Child(name, [sys.executable, str(ROOT / "train.py"), *options, *turns], threads)
