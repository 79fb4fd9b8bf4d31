"""What every option and entry point checks about its inputs, each with an error that names the culprit."""

import math
from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor


def check_number(name: str, value: Any, interval: str, *, integer: bool = False) -> None:
    """Raise ValueError unless `value` is a number in `interval`, written as in mathematics: "(0, 1]", "[0, inf)"."""
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    kind = "an integer" if integer else "a number"
    if isinstance(value, bool) or not isinstance(value, int if integer else (int, float)):
        raise ValueError(f"{name} must be {kind} in {interval}, got {value!r}")
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    if not (above and below and math.isfinite(value)):
        raise ValueError(f"{name} must be in {interval}, got {value!r}")


def check_bool(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")


def check_mask(mask: Tensor) -> None:
    """Raise ValueError unless `mask` is a bool tensor [N, T]."""
    if mask.dtype is not torch.bool or mask.dim() != 2:
        raise ValueError(f"mask must be a bool tensor [rows, positions], got {mask.dtype} {list(mask.shape)}")


def check_shape(name: str, tensor: Tensor, shape: torch.Size) -> None:
    """Raise ValueError unless `tensor` has exactly `shape`: nothing is broadcast."""
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")


def check_finite(name: str, values: Tensor, mask: Tensor) -> None:
    """Raise ValueError naming row and position of the first value [N, T] under `mask` that is inf or NaN."""
    bad = mask & ~torch.isfinite(values)
    if bad.any():
        row, position = bad.nonzero()[0].tolist()
        raise ValueError(f"{name} is {values[row, position].item()} at row {row}, position {position}")


def keywords(option: Callable[..., Any]) -> dict[str, bool]:
    """The keyword-only arguments that an option takes: name -> whether it must be given."""
    parameters = signature(option).parameters.items()
    return {name: p.default is Parameter.empty for name, p in parameters if p.kind is Parameter.KEYWORD_ONLY}


def call(label: str, option: Callable[..., Any], *args: Any, **available: Any) -> Any:
    """Call an option with those of the `available` keywords that it takes; None counts as not available.

    Raises ValueError naming the option (`label`) and the keyword that it needs and nobody gave.
    """
    given = {name: available[name] for name in keywords(option) if available.get(name) is not None}
    for name, required in keywords(option).items():
        if required and name not in given:
            raise ValueError(f"{label} needs `{name}`, which was not given")
    return option(*args, **given)


def check_keywords(
    mask: Tensor,
    *,
    correct: Tensor | None,
    components: Mapping[str, Tensor] | None,
    step_rewards: Tensor | None,
    step_ends: Tensor | None,
    prompt_ids: Tensor | None,
) -> None:
    """Raise ValueError naming what is not of the rows and positions of `mask` [N, T], or not a number."""
    rows = mask.shape[:1]
    for name, values in {"correct": correct, "prompt_ids": prompt_ids, **(components or {})}.items():
        if values is not None:
            check_shape(name, values, rows)
            if values.is_floating_point() and torch.isinf(values).any():
                raise ValueError(f"{name} is infinite at row {int(torch.isinf(values).nonzero()[0])}")
    if correct is not None and correct.is_floating_point() and torch.isnan(correct).any():
        raise ValueError(f"correct is nan at row {int(torch.isnan(correct).nonzero()[0])}: give the row no reward")
    if step_rewards is not None and step_ends is not None:
        check_shape("step_rewards", step_rewards, torch.Size([*rows, *step_rewards.shape[1:2]]))
        check_shape("step_ends", step_ends, step_rewards.shape)
        if torch.isinf(step_rewards).any():
            raise ValueError(f"step_rewards is infinite at row {int(torch.isinf(step_rewards).nonzero()[0][0])}")
        if (step_ends >= mask.shape[1]).any():
            raise ValueError(f"step_ends has a position behind the last of {mask.shape[1]}: {int(step_ends.max())}")
