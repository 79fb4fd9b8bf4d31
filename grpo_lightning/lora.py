"""LoRA through peft: adapters in the policy, the policy without them, and the weights with the adapters merged in.

The adapters are put into the model itself (it keeps its class and its names), so that whatever takes a model takes this
one too. Only `W + scale B A` leaves it, under the model's own names: engines and exports get an ordinary model.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from grpo_lightning.errors import UsageError

ADAPTER = "default"  # the name peft gives the only adapter there is


def check_lora(r: int | None, alpha: float | None, target_modules: str | Sequence[str] | None) -> None:
    """Refuse values that mean nothing, before a model is loaded.

    Raises:
        UsageError: naming the option of `model.lora`.
    """
    for name, value in (("alpha", alpha), ("target_modules", target_modules)):
        if r is None and value is not None:
            raise UsageError(f"model.lora.{name} does nothing without model.lora.r: give the rank, such as 16")
    if r is not None and r < 1:
        raise UsageError(f"model.lora.r must be at least 1, or null for no LoRA, got {r}")
    if alpha is not None and not alpha > 0:
        raise UsageError(f"model.lora.alpha must be above 0, got {alpha}")
    names = [target_modules] if isinstance(target_modules, str) else target_modules
    if names is not None and not (isinstance(names, Sequence) and all(isinstance(name, str) for name in names)):
        raise UsageError(f"model.lora.target_modules must be a list of names such as [q_proj,v_proj], got {names}")


def add_adapters(
    model: PreTrainedModel,
    *,
    r: int,
    alpha: int | float | None = None,
    target_modules: str | Sequence[str] | None = None,
) -> None:
    """Put adapters into `model`, which compute 0 at first, and freeze everything else.

    There is no dropout in them: a ratio of two dropout masks is not an importance ratio.

    Args:
        r: the rank. alpha: what an adapter adds is scaled by alpha / r; None: 2 r.
        target_modules: names of linear layers, as a whole or their last parts; None: all but the output layer.

    Raises:
        UsageError: a name is that of no linear layer, or nothing could be trained.
    """
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    head = model.get_output_embeddings()
    if target_modules is None:
        targets = [name for name, module in linear.items() if module is not head]
    else:
        wanted = [target_modules] if isinstance(target_modules, str) else list(target_modules)
        found = {want: [name for name in linear if f".{name}".endswith(f".{want}")] for want in wanted}
        targets = [name for names in found.values() for name in names]
        missing = [want for want, names in found.items() if not names]
        if missing or not targets:
            there = sorted({name.rpartition(".")[2] for name in linear})
            raise UsageError(
                f"model.lora.target_modules=[{','.join(wanted)}]: the model has no linear layer "
                f"{' or '.join(missing) or 'of no name'}; it has {', '.join(there)}"
            )
        if model.config.tie_word_embeddings and any(linear[name] is head for name in targets):
            raise UsageError(
                f"model.lora.target_modules=[{','.join(wanted)}]: the output layer of this model is also its input "
                "embedding, so that no adapter can be merged into it alone; leave it out"
            )
    transposed = {name for name in targets if isinstance(linear[name], Conv1D)}
    if transposed and len(transposed) < len(targets):
        raise UsageError("model.lora.target_modules names layers of both Linear and Conv1D, which peft cannot mix")
    scale: Any = 2 * r if alpha is None else alpha
    config = LoraConfig(
        r=r, lora_alpha=scale, target_modules=targets, lora_dropout=0.0, bias="none", fan_in_fan_out=bool(transposed)
    )  # fmt: skip
    inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("model.lora: the model has no linear layer that an adapter could be put into")


def merge_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model with the adapter that peft saved in `folder` added to its weights.

    Raises:
        Exception: peft's own, where the adapter does not fit the model or cannot be merged into it.
    """
    merged = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    return merged.requires_grad_(True)


def has_adapters(model: nn.Module) -> bool:
    """Whether there are adapters in the model."""
    return any(isinstance(module, LoraLayer) for module in model.modules())


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """A context in which the model computes what it computed before adapters were put into it."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    try:
        for layer in layers:
            # Not enable_adapters(False): that takes the gradient away from the adapters, too, and FSDP, which looks at
            # it in the first forward pass only, would not give it back.
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def is_adapter_weight(name: str) -> bool:
    """Whether a name of a state dict is that of an adapter's matrix."""
    return ".lora_A." in name or ".lora_B." in name


@torch.no_grad()
def merged(layer: LoraLayer, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The weight of `layer` with its adapter `b a` added: a new tensor."""
    scale = layer.scaling[ADAPTER]
    left, right = (a.T, b.T) if isinstance(layer.get_base_layer(), Conv1D) else (b, a)
    return torch.addmm(weight, left, right, alpha=scale)
