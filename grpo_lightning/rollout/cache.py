"""A key-value cache that is written in place, and attention over it that copies no head.

transformers' DynamicCache copies the whole cache for every token, and its SDPA attention repeats the key-value heads
for every query head as soon as there is a mask. Both cost more than the attention itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "grpo_lightning_grouped"  # the name of `grouped_attention` among transformers' attention implementations
ROOM = 16  # positions of room that a cache starts with; few, since fresh memory costs more than a copy of little


class RowLayer(DynamicLayer):
    """Keys and values of one layer in buffers [R, heads, capacity, size]; `keys`, `values` are views of the live part.

    Args:
        rows: R. width: the positions of the prompts, padded at the left; `fill` writes them.
        limit: the most positions that there will ever be.
        key_like, value_like: tensors [*, heads, *, size] of the dtype and device.
    """

    def __init__(self, rows: int, width: int, limit: int, key_like: Tensor, value_like: Tensor) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = key_like.dtype, key_like.device, True
        self.rows, self.limit = rows, limit
        capacity = min(width + ROOM, limit)
        # Zeros: what stands left of a prompt is masked, but must be finite.
        self._keys, self._values = (
            like.new_zeros(rows, like.shape[1], capacity, like.shape[3]) for like in (key_like, value_like)
        )
        self._look(width)

    def fill(self, at: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write prompts [N, heads, S, size] into the rows `at` [N], right before the first new position."""
        end = self.get_seq_length()
        self._keys[at, :, end - keys.shape[2] : end] = keys
        self._values[at, :, end - values.shape[2] : end] = values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        begin = self.get_seq_length()
        end = begin + key_states.shape[2]
        if end > self._keys.shape[2]:
            self._grow(begin, max(end, min(self.limit, begin + begin // 2)))
        self._keys[: self.rows, :, begin:end] = key_states
        self._values[: self.rows, :, begin:end] = value_states
        return self._look(end)

    def move(self, source: Tensor, target: Tensor, rows: int) -> None:
        """Copy the rows `source` over the rows `target`, then keep the first `rows`."""
        end = self.get_seq_length()
        if len(source):
            self._keys[target, :, :end] = self._keys[source, :, :end]
            self._values[target, :, :end] = self._values[source, :, :end]
        self.rows = rows
        self._look(end)

    def _grow(self, filled: int, capacity: int) -> None:
        def grown(old: Tensor) -> Tensor:
            new = old.new_empty(self.rows, old.shape[1], capacity, old.shape[3])
            new[:, :, :filled] = old[: self.rows, :, :filled]
            return new

        self._keys = grown(self._keys)  # one after the other: less is held at once
        self._values = grown(self._values)

    def _look(self, end: int) -> tuple[Tensor, Tensor]:
        keys, values = self._keys[: self.rows, :, :end], self._values[: self.rows, :, :end]
        self.keys, self.values = keys, values
        return keys, values


def writes_in_place(cache: object) -> bool:
    """Whether `RowLayer` can stand for the layers of a cache: plain attention over all positions in each."""
    return isinstance(cache, DynamicCache) and all(type(layer) is DynamicLayer for layer in cache.layers)


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """SDPA of one new position: the query heads that share a key-value head stand where query positions do.

    query [N, H, 1, D], key and value [N, K, S, D], mask [N, 1, 1, S] or None -> [N, 1, H, D].
    """
    rows, heads, steps, size = query.shape
    if steps != 1 or heads == key.shape[1] or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    grouped = query.reshape(rows, key.shape[1], -1, size)
    out = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling)
    return out.reshape(rows, 1, heads, value.shape[3]), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


def takes_grouped(model: nn.Module) -> bool:
    """Whether the model's attention is transformers' SDPA and can be exchanged for `grouped_attention`."""
    return (
        isinstance(model, PreTrainedModel)
        and bool(model._supports_attention_backend)
        and model.config._attn_implementation == "sdpa"
        and not model.config.sub_configs
    )


@contextmanager
def grouped(model: PreTrainedModel) -> Iterator[None]:
    """A context in which the model's attention is `grouped_attention`."""
    before = model.config._attn_implementation
    model.set_attn_implementation(GROUPED)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
