"""Rows of a rollout, and how they are cut: into minibatches of whole groups, and those into micro-batches of rows."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Scores(NamedTuple):
    """What a model says of one row: logp and entropy [T] float32 of its completion, and the critic's values [T]."""

    logp: Tensor
    entropy: Tensor
    values: Tensor | None


@dataclass
class Row:
    """One prompt with one completion, as it is trained on.

    Attributes:
        token_ids: [S] int64, prompt and completion.
        loss_mask: [S] bool, the tokens the policy is trained on. A row that is taken out of the loss has none.
        start: where the completion begins; the objective sees the T = S - start positions from here on.
        group_id: the group this row belongs to; unique over the run. prompt_id: its prompt in the data.
        sampler_logp: [T] float32, the engine's at sampling.
        weights_version: optimiser steps of the weights that sampled it.
        old_logp: [T] float32, the trainer's at those weights; None while the current weights are those weights and no
            update lies between, so that logp.detach() is the same number.
        ref_logp: [T] float32 under the frozen reference policy, if there is one.
        entropy: [T] float32, nats, of the policy that sampled it; only where the advantages are made of it.
        values, returns: [T] float32, what the critic expected at sampling and what came; only where there is a critic.
        advantage: [T] float32.
        record: what is written to the rollout file: prompt, completion, rewards and so on.
    """

    token_ids: Tensor
    loss_mask: Tensor
    start: int
    group_id: int
    prompt_id: int
    sampler_logp: Tensor
    weights_version: int
    old_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    advantage: Tensor | None = None
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens of the completion, its end-of-sequence token included."""
        return len(self.token_ids) - self.start


@dataclass(frozen=True)
class Batch:
    """Rows side by side: prompts padded on the left and completions on the right, so that every completion begins in
    column `start`. `mask`, `group_ids` and the [N, T] tensors are what the objective sees."""

    input_ids: Tensor
    attention_mask: Tensor
    start: int
    mask: Tensor
    group_ids: Tensor
    advantages: Tensor | None
    sampler_logp: Tensor
    old_logp: Tensor | None
    fresh: Tensor
    ref_logp: Tensor | None
    values: Tensor | None
    returns: Tensor | None

    def to(self, device: torch.device) -> "Batch":
        tensors: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **tensors)


def pad_completions(values: list[Tensor], width: int, fill: float = 0.0) -> Tensor:
    """[N, width] from N vectors of different lengths, filled on the right."""
    out = values[0].new_full((len(values), width), fill)
    for row, value in enumerate(values):
        out[row, : len(value)] = value
    return out


def loss_masks(rows: list[Row]) -> tuple[Tensor, Tensor]:
    """The loss mask [N, T] of all rows on completion positions, and the group ids [N]."""
    width = max(row.length for row in rows)
    mask = pad_completions([row.loss_mask[row.start :] for row in rows], width, False)
    return mask, torch.tensor([row.group_id for row in rows])


def collate(rows: list[Row]) -> Batch:
    """Put rows side by side. Padding exists only here and inside the model's forward pass."""
    start = max(row.start for row in rows)
    mask, group_ids = loss_masks(rows)
    width = start + mask.shape[1]
    input_ids = torch.zeros(len(rows), width, dtype=torch.long)
    attention_mask = torch.zeros(len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        begin = start - row.start
        input_ids[number, begin : begin + len(row.token_ids)] = row.token_ids
        attention_mask[number, begin : begin + len(row.token_ids)] = 1

    def padded(values: list[Tensor | None]) -> Tensor | None:
        present = [value for value in values if value is not None]
        if not present:
            return None
        filled = [torch.zeros(r.length) if v is None else v for r, v in zip(rows, values, strict=True)]
        return pad_completions(filled, mask.shape[1])

    return Batch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        start=start,
        mask=mask,
        group_ids=group_ids,
        advantages=padded([row.advantage for row in rows]),
        sampler_logp=pad_completions([row.sampler_logp for row in rows], mask.shape[1]),
        old_logp=padded([row.old_logp for row in rows]),
        fresh=torch.tensor([row.old_logp is None for row in rows]),
        ref_logp=padded([row.ref_logp for row in rows]),
        values=padded([row.values for row in rows]),
        returns=padded([row.returns for row in rows]),
    )


def shares(rows: list[Row], processes: int) -> list[list[int]]:
    """Indices of the rows of each process: about as many rows, of the same lengths, for each."""
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i].token_ids), rows[i].start, i))
    return [order[number::processes] for number in range(processes)]


def cut_for(rows: list[Row], micro_batch_tokens: int, process: int, processes: int) -> list[tuple[list[int], bool]]:
    """The micro-batches of one process, as indices into `rows`, the same number for every process: where it has fewer
    than another it repeats one, with False, which counts for nothing. Sharded models need all to take part in each."""
    if not rows:
        return []
    parts = [
        [[part[i] for i in batch] for batch in cut([rows[i] for i in part], micro_batch_tokens)]
        for part in shares(rows, processes)
    ]
    filler = next(batches[0] for batches in parts if batches)[:1]
    own = [(batch, True) for batch in parts[process]]
    return own + [(filler, False)] * (max(map(len, parts)) - len(own))


def cut(rows: list[Row], micro_batch_tokens: int) -> list[list[int]]:
    """Indices of the rows of each micro-batch: rows of similar length together, at most `micro_batch_tokens` padded
    tokens each (prompt and completion), and at least one row."""
    batches: list[list[int]] = []
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i].token_ids), rows[i].start, i))
    prompt = completion = 0
    for index in order:
        prompt_next, completion_next = max(prompt, rows[index].start), max(completion, rows[index].length)
        if not batches or (len(batches[-1]) + 1) * (prompt_next + completion_next) > micro_batch_tokens:
            batches.append([])
            prompt_next, completion_next = rows[index].start, rows[index].length
        batches[-1].append(index)
        prompt, completion = prompt_next, completion_next
    return batches


class RolloutBuffer:
    """The rows of the current rollout. A minibatch is one optimiser step, made of whole groups, shuffled as groups.

    Args:
        epochs: passes over a rollout. minibatches: optimiser steps a pass. seed: of the shuffle.
    """

    def __init__(self, epochs: int, minibatches: int, seed: int) -> None:
        self.epochs, self.minibatches, self.seed = epochs, minibatches, seed
        self.rows: list[Row] = []
        self._plan: list[list[int]] = []

    def __len__(self) -> int:
        """Optimiser steps a rollout has at most."""
        return self.epochs * self.minibatches

    def fill(self, rows: list[Row], rollout: int) -> None:
        """Take the rows of rollout number `rollout` (from 1) and plan its minibatches."""
        self.rows = rows
        groups: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault(row.group_id, []).append(index)
        members = list(groups.values())
        self._plan = []
        for epoch in range(self.epochs):
            order = np.random.default_rng([self.seed, rollout, epoch]).permutation(len(members))
            for part in np.array_split(order, self.minibatches):
                self._plan.append([index for group in part for index in members[group]])

    def minibatch(self, number: int) -> list[Row]:
        """The rows of optimiser step `number` (from 0) of this rollout; empty when there are too few groups."""
        return [self.rows[index] for index in self._plan[number]]
