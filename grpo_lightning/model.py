"""Loading a policy: any Hugging Face id or local folder; its tokenizer and its end-of-sequence ids."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from grpo_lightning.distributed import layers
from grpo_lightning.errors import UsageError
from grpo_lightning.lora import add_adapters, check_lora, has_adapters, merge_adapter

TINY_MODEL = Path(__file__).parent / "models" / "tiny"
ADAPTER_CONFIG = "adapter_config.json"


def resolve_path(path: str) -> str:
    """The folder or hub id of the whole model that `model.path` names: of a peft adapter, its base model's.

    "tiny" is the model shipped in the package.

    Raises:
        UsageError: it looks like a folder (or is no valid hub id) and is not there.
    """
    if path == "tiny":
        return str(TINY_MODEL)
    if adapter := _adapter_folder(path):
        base = _base_of(adapter)
        try:
            return resolve_path(base)
        except UsageError as error:
            raise UsageError(f"model.path={path} is an adapter, and its base model is not there: {error}") from error
    if Path(path).expanduser().is_dir():
        folder = Path(path).expanduser()
        if not (folder / "config.json").exists():
            raise UsageError(
                f"model.path={path}: the folder has no config.json, so it is not a Hugging Face model folder"
            )
        return str(folder)
    looks_like_folder = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_like_folder:
        raise UsageError(f"model.path={path}: no such folder; give a Hugging Face folder or an id such as org/name")
    return path


def _adapter_folder(path: str) -> Path | None:
    folder = Path(path).expanduser()
    return folder if (folder / ADAPTER_CONFIG).is_file() else None


def _base_of(adapter: Path) -> str:
    try:
        base = json.loads((adapter / ADAPTER_CONFIG).read_text())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    if not isinstance(base, str) or not base:
        raise UsageError(f"model.path={adapter}: its {ADAPTER_CONFIG} names no base_model_name_or_path")
    if base == str(adapter):
        raise UsageError(f"model.path={adapter}: its {ADAPTER_CONFIG} names the adapter itself as its base model")
    return base


def load_tokenizer(path: str) -> Any:
    """The tokenizer of `path`. Padding uses ids directly, so that a tokenizer without a pad token is no trouble."""
    adapter = _adapter_folder(path)
    own = adapter is not None and (adapter / "tokenizer_config.json").exists()  # peft's folders need not have one
    try:
        return AutoTokenizer.from_pretrained(str(adapter) if own else resolve_path(path))
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(_load_message(path, "tokenizer", error)) from error


def load_policy(
    path: str, *, attn_implementation: str | None = None, lora: Mapping[str, Any] | None = None
) -> nn.Module:
    """The model in float32 (master weights: an update of 1e-6 on a bfloat16 weight rounds to nothing), dropout off.

    Args:
        path: `model.path`. A peft adapter is merged into its base model, so that both together are the policy that
            training starts from and that the reference stays.
        lora: the options of `model.lora`; without a rank, every weight is trained.

    Raises:
        UsageError: the folder or id cannot be loaded, or the options of LoRA do not fit the model.
    """
    if lora:
        check_lora(**lora)
    model = _load(path, attn_implementation)
    disable_dropout(model)
    if lora and lora["r"] is not None:
        add_adapters(model, **lora)
    return model


def _load(path: str, attn_implementation: str | None) -> PreTrainedModel:
    adapter = _adapter_folder(path)
    try:
        folder = resolve_path(path)
        if adapter is not None:
            return merge_adapter(_load(_base_of(adapter), attn_implementation), adapter)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attn_implementation
        )
    except UsageError:
        raise
    except Exception as error:  # a damaged file, a missing attention package, no network: all the user's to mend
        if attn_implementation is not None and ("attn_impl" in str(error) or "Attention" in str(error)):
            raise UsageError(
                f"model.attn_implementation={attn_implementation}: {_first_line(error)} (null: transformers chooses)"
            ) from error
        raise UsageError(_load_message(path, "adapter" if adapter else "model", error)) from error
    if has_adapters(model):
        raise UsageError(f"model.path={path} is an adapter on the hub: download it, and give its folder")
    return model


def _load_message(path: str, what: str, error: Exception) -> str:
    return f"model.path={path}: the {what} could not be loaded ({_first_line(error)})"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout rate to 0: a ratio of two dropout masks is not an importance ratio.

    Some attention modules keep their rate as a float attribute instead of a Dropout module, and read it in training.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def hasten(model: nn.Module, *, compile: bool, liger: bool) -> None:
    """Make the model compute the same faster: its layers by torch.compile, or some of their parts by Liger's kernels.

    Raises:
        UsageError: the machine or the model cannot.
    """
    if liger:
        if not torch.cuda.is_available():
            raise UsageError("model.liger=true: Liger's kernels need a GPU, and there is none here: model.liger=false")
        try:
            from liger_kernel.transformers import _apply_liger_kernel_to_instance
        except ImportError as error:
            raise UsageError("model.liger=true needs Liger: pip install liger-kernel") from error
        _apply_liger_kernel_to_instance(model=model)
    if compile:
        if not torch.cuda.is_available() and not any(map(shutil.which, ("c++", "g++", "clang++"))):
            raise UsageError("model.compile=true needs a C++ compiler on a CPU, and there is none: model.compile=false")
        # Layer by layer: they are alike, so that one compilation serves all. In place: the names of weights stay.
        for layer in layers(model):
            layer.compile(dynamic=True)


def eos_token_ids(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a completion: of the generation config (it may list several) and of the tokenizer.

    Raises:
        UsageError: there is none, so no completion could ever end.
    """
    ids: set[int] = set()
    for value in (
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        ids.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    if not ids:
        raise UsageError("the model and its tokenizer name no end-of-sequence token, so no completion could end")
    return tuple(sorted(ids))
