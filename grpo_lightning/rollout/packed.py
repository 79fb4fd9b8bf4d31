"""Linear layers on a CPU with weights laid out for oneDNN's kernels, as long as the weights stay what they are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

SMALLEST = 2**16  # weights of a layer; for smaller ones a call costs more than it saves


def can_pack() -> bool:
    """Whether this machine has the kernels (x86 with AVX2 at least), and linear layers compute in float32."""
    return (
        torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and torch.backends.cpu.get_cpu_capability().startswith("AVX")
        and not torch.is_autocast_enabled("cpu")
    )


@contextmanager
def packed(model: nn.Module) -> Iterator[None]:
    """A context, without gradients, in which float32 linear layers on the CPU use packed copies of their weights.

    PyTorch's own call lays the weights out anew each time, which for the few rows of a decoding step takes about as
    long as the product. The copies are as large as the weights, and are given back at the end.
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear and _packable(module)]
    layers = layers if can_pack() else []
    try:
        for layer in layers:
            layer.forward = _forward(layer)  # type: ignore[method-assign, assignment]
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _packable(layer: nn.Linear) -> bool:
    weight = layer.weight
    fits = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= SMALLEST
    return fits and "forward" not in vars(layer)


def _forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    weight, bias = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach()), layer.bias
    product = torch.ops.mkldnn._linear_pointwise

    def forward(x: Tensor) -> Tensor:
        return product(x, weight, bias, "none", [], "")

    return forward
