"""The model's side of generation: prompts prefilled once each, and a batch of rows that goes on token by token."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from grpo_lightning.errors import UsageError
from grpo_lightning.rollout.cache import RowLayer, grouped, takes_grouped, writes_in_place

PREFILL_TOKENS = 8192  # prompt tokens, padding included, in one forward pass


class Batch:
    """Rows that are being decoded.

    Args:
        cache: of the rows [R]; their prompts end at position `width` and are padded at the left.
        lengths: [R] int64, tokens of the prompts.
        limit: the most positions that there will be.
    """

    def __init__(self, model: nn.Module, cache: DynamicCache, lengths: Tensor, width: int, limit: int) -> None:
        self.model, self.cache = model, cache
        self.positions = lengths.unsqueeze(1)
        self.length = width
        self.in_place = isinstance(cache.layers[0], RowLayer)
        self.grouped = self.in_place and takes_grouped(model)
        columns = torch.arange(limit, device=lengths.device)
        padding = columns < width - self.positions
        self.mask: Tensor | None = (~padding).long()
        if self.grouped:  # as SDPA takes it, so that nothing builds or converts it at each step and layer
            like = cast(Tensor, cast(RowLayer, cache.layers[0]).keys)
            zeros = like.new_zeros(len(lengths), 1, 1, limit)
            self.mask = zeros.masked_fill_(padding[:, None, None], -torch.inf) if padding.any() else None

    def attention(self) -> AbstractContextManager[None]:
        """The context that `step` belongs in."""
        return grouped(cast(PreTrainedModel, self.model)) if self.grouped else nullcontext()

    def step(self, tokens: Tensor) -> Tensor:
        """The next token of each row, [L] int64 -> the logits after it, [L, V]."""
        self.length += 1
        out = self.model(
            input_ids=tokens.unsqueeze(1),
            attention_mask=None if self.mask is None else self.mask[..., : self.length],
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.positions = self.positions + 1
        return out.logits[:, -1]

    def move(self, source: np.ndarray, target: np.ndarray, rows: int, tokens: Tensor) -> Tensor:
        """The rows `source` take the places of the rows `target`, and the first `rows` stay. Returns their `tokens`."""
        device = tokens.device
        chosen = np.arange(rows)
        chosen[target] = source
        keep = torch.from_numpy(chosen).to(device)
        if self.in_place:
            at, to = torch.from_numpy(source).to(device), torch.from_numpy(target).to(device)
            for layer in cast(list[RowLayer], self.cache.layers):
                layer.move(at, to, rows)
        else:
            self.cache.batch_select_indices(keep)
        self.positions = self.positions[keep]
        self.mask = None if self.mask is None else self.mask[keep]
        return tokens[keep]


def prefill(
    model: nn.Module, prompts: list[tuple[int, ...]], owner: np.ndarray, new: int, device: torch.device
) -> tuple[Batch, Tensor]:
    """Run each prompt once, and copy its cache to its rows.

    Args:
        prompts: P of them. owner: [R] int64, the prompt of each row. new: the most tokens a row may get.

    Returns:
        The rows, and the logits [R, V] after their prompts.
    """
    width = max(len(ids) for ids in prompts)
    limit = width + new
    rows_of = torch.from_numpy(owner).to(device)
    lengths = torch.tensor([len(ids) for ids in prompts], device=device)[rows_of]
    layers: list[RowLayer] = []
    logits: Tensor | None = None
    for part in _parts(prompts):
        out = _forward(model, [prompts[number] for number in part], device)
        cache = out.past_key_values
        if not writes_in_place(cache):
            out = _forward(model, prompts, device) if len(part) < len(prompts) else out
            cache = out.past_key_values
            order = rows_of if len(part) < len(prompts) else torch.tensor(np.argsort(part), device=device)[rows_of]
            cache.batch_select_indices(order)
            return Batch(model, cache, lengths, width, limit), out.logits[:, -1][order]
        layers = layers or [RowLayer(len(owner), width, limit, layer.keys, layer.values) for layer in cache.layers]
        at = np.flatnonzero(np.isin(owner, part))
        source = torch.from_numpy(np.argsort(part)[np.searchsorted(np.sort(part), owner[at])]).to(device)
        rows = torch.from_numpy(at).to(device)
        for filled, layer in zip(layers, cache.layers, strict=True):
            filled.fill(rows, layer.keys[source], layer.values[source])
            layer.reset()  # one layer after the other: less is held at once
        last = out.logits[:, -1]
        logits = last.new_empty(len(owner), last.shape[1]) if logits is None else logits
        logits[rows] = last[source]
    in_place = DynamicCache()
    in_place.layers = [*layers]
    return Batch(model, in_place, lengths, width, limit), cast(Tensor, logits)


def _parts(prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """The numbers of the prompts, those of like lengths together, in parts of at most PREFILL_TOKENS (or of one)."""
    parts: list[list[int]] = []
    for number in sorted(range(len(prompts)), key=lambda number: len(prompts[number])):
        if not parts or (len(parts[-1]) + 1) * len(prompts[number]) > PREFILL_TOKENS:
            parts.append([])
        parts[-1].append(number)
    return parts


def _forward(model: nn.Module, prompts: list[tuple[int, ...]], device: torch.device):  # type: ignore[no-untyped-def]
    """The model's output after left-padded prompts, with the logits of the last position only."""
    width = max(len(ids) for ids in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for number, prompt in enumerate(prompts):
        ids[number, width - len(prompt) :] = torch.tensor(prompt)
        mask[number, width - len(prompt) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    out = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        past_key_values=DynamicCache(config=cast(PreTrainedConfig, model.config)),
        use_cache=True,
        logits_to_keep=1,
    )
    layers = getattr(getattr(out, "past_key_values", None), "layers", [])
    if not layers or not all(hasattr(layer, "batch_select_indices") for layer in layers):
        raise UsageError(
            f"rollout=hf cannot sample from a {type(model).__name__}, which has no key-value cache in every layer: "
            "rollout=vllm or rollout=vllm_server"
        )
    return out


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """A context in which modules that `Module.compile` was called on run as they were written.

    They were compiled for the update; the shapes and caches of decoding would compile them again, for minutes.
    """
    compiled = [(module, module._compiled_call_impl) for module in model.modules() if module._compiled_call_impl]
    try:
        for module, _ in compiled:
            module._compiled_call_impl = None
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call
