"""Rows as the model sees them and as the objective sees them.

The model sees packs: rows that have one prompt stand behind a single copy of it, and see it and themselves alone. The
objective sees [N, T]: N rows, T completion positions. Packing and padding exist only here and in the forward pass.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.rollout.buffer import Row

PROMPT, PADDING = 0, -1  # in `segments`; the rows of a pack are numbered from 1


@dataclass(frozen=True)
class Batch:
    """N rows of K completion tokens in all, in B packs of S tokens, padded on the right.

    Attributes:
        input_ids, position_ids: [B, S] int64. The last token of a row is not among them: it predicts nothing here.
        segments: [B, S] int64: of which row of its pack a token is, or PROMPT or PADDING. None where every row has a
            pack of its own: then a causal mask is enough.
        places: [K] int64, where in the flattened [B, S] each completion token is predicted, row by row.
        targets: [K] int64, those tokens. slots: [K] int64, where they stand in the flattened [N, T].
        mask: [N, T] bool, group_ids [N] and the other [N, T] tensors: what the objective sees.
        fresh: [N] bool, rows without an old_logp of their own.
    """

    input_ids: Tensor
    position_ids: Tensor
    segments: Tensor | None
    places: Tensor
    targets: Tensor
    slots: Tensor
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

    def spread(self, values: Tensor) -> Tensor:
        """[N, T] from one value for each of the K completion tokens; 0 where a row has no token."""
        flat = values.new_zeros(self.mask.numel()).index_copy(0, self.slots, values)
        return flat.view(self.mask.shape)


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


def pack_tokens(rows: list[Row]) -> int:
    """Tokens of a pack of rows that share their prompt."""
    return rows[0].start + sum(row.length - 1 for row in rows)


def collate(rows: list[Row], packs: list[int] | None = None) -> Batch:
    """Put rows together; `packs` says how many at a time stand behind one prompt (by default each has its own)."""
    packs = packs or [1] * len(rows)
    mask, group_ids = loss_masks(rows)
    steps = mask.shape[1]
    members, at = [], 0
    for size in packs:
        members.append(rows[at : at + size])
        at += size
    width = max(pack_tokens(pack) for pack in members)
    input_ids = torch.zeros(len(packs), width, dtype=torch.long)
    position_ids = torch.zeros(len(packs), width, dtype=torch.long)
    segments = torch.full((len(packs), width), PADDING)
    places, targets, slots = [], [], []
    number = 0
    for line, pack in enumerate(members):
        start = pack[0].start
        input_ids[line, :start] = pack[0].token_ids[:start]
        position_ids[line, :start] = torch.arange(start)
        segments[line, :start] = PROMPT
        end = start
        for which, row in enumerate(pack, 1):
            own = slice(end, end + row.length - 1)
            input_ids[line, own] = row.token_ids[start:-1]
            position_ids[line, own] = torch.arange(start, start + row.length - 1)
            segments[line, own] = which
            # The last token of the prompt predicts the first of the completion, each of those the next one.
            places.append(line * width + torch.cat([torch.tensor([start - 1]), torch.arange(own.start, own.stop)]))
            targets.append(row.token_ids[start:])
            slots.append(number * steps + torch.arange(row.length))
            end, number = own.stop, number + 1

    def padded(values: list[Tensor | None]) -> Tensor | None:
        if all(value is None for value in values):
            return None
        filled = [torch.zeros(r.length) if v is None else v for r, v in zip(rows, values, strict=True)]
        return pad_completions(filled, steps)

    return Batch(
        input_ids=input_ids,
        position_ids=position_ids,
        segments=segments if max(packs) > 1 else None,
        places=torch.cat(places),
        targets=torch.cat(targets),
        slots=torch.cat(slots),
        mask=mask,
        group_ids=group_ids,
        advantages=padded([row.advantage for row in rows]),
        sampler_logp=pad_completions([row.sampler_logp for row in rows], steps),
        old_logp=padded([row.old_logp for row in rows]),
        fresh=torch.tensor([row.old_logp is None for row in rows]),
        ref_logp=padded([row.ref_logp for row in rows]),
        values=padded([row.values for row in rows]),
        returns=padded([row.returns for row in rows]),
    )
