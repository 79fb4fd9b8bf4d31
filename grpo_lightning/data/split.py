"""Train and held-out items, disjoint by content and chosen by content, so that no seed can mix them."""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_lightning.data.prompts import Item, render
from grpo_lightning.errors import UsageError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Split:
    """duplicates: rows left out because their content occurs before (or, in train, among the held-out)."""

    train: list[Item]
    held_out: list[Item]
    duplicates: int


def content(item: Item, template: str) -> str:
    """What makes two prompts the same: their rendered text, letter case and blanks aside."""
    rendered = render(item, template)
    text = rendered if isinstance(rendered, str) else json.dumps(rendered, ensure_ascii=False)
    return " ".join(text.casefold().split())


def split(items: Sequence[Item], eval_prompts: int, template: str, held_out: Sequence[Item] | None = None) -> Split:
    """Take `eval_prompts` held-out items out of `items`, or out of `held_out` where the data has them of its own.

    The held-out items are those whose content has the smallest hashes: they do not depend on a seed or on the order
    of the rows. With a held-out file of its own, training items that occur anywhere in that file are left out.
    Raises UsageError if there are not enough different items.
    """
    if isinstance(eval_prompts, bool) or not isinstance(eval_prompts, int) or eval_prompts < 0:
        raise UsageError(f"eval.prompts must be a whole number from 0, got {eval_prompts!r}")
    train = _unique(items, template)
    dropped = len(items) - len(train)
    if held_out is None:
        source, what = train, "the data"
    else:
        source, what = _unique(held_out, template), "the held-out file"
        dropped += len(held_out) - len(source)
    if eval_prompts > len(source) or (held_out is None and eval_prompts == len(source)):
        left = "" if held_out is not None else " and training needs some of them"
        raise UsageError(f"eval.prompts={eval_prompts}, but {what} has {len(source)} different prompts{left}")
    chosen = sorted(source, key=lambda key: hashlib.blake2b(key.encode()).digest())[:eval_prompts]
    forbidden = set(chosen) if held_out is None else set(source)
    kept = [item for key, item in train.items() if key not in forbidden]
    if held_out is not None:
        dropped += len(train) - len(kept)
    if not kept:
        raise UsageError("data: no training prompt is left that is not in the held-out file too")
    if dropped:
        logger.info("%d of %d rows repeat other rows and are left out", dropped, len(items) + len(held_out or ()))
    return Split(kept, [source[key] for key in chosen], dropped)


def _unique(items: Sequence[Item], template: str) -> dict[str, Item]:
    """The first item of each content, in order."""
    unique: dict[str, Item] = {}
    for item in items:
        unique.setdefault(content(item, template), item)
    return unique
