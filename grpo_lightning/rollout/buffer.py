"""Rows of a rollout, and how they are cut into minibatches of whole groups."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
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
