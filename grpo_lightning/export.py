"""The policy as an ordinary Hugging Face folder: from a run, or from the checkpoint of one."""

import shutil
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_lightning.distributed import rank
from grpo_lightning.errors import RunError, UsageError
from grpo_lightning.lora import has_adapters, is_adapter_weight
from grpo_lightning.model import load_policy, load_tokenizer
from grpo_lightning.rollout.weights import named_weights


def export(policy: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write weights (with adapters merged), configuration, generation configuration and tokenizer into `folder`.

    Every process has to call it; rank 0 writes. What is in `folder` is replaced at once, when the new one is whole.

    Raises:
        RunError: the folder cannot be written.
    """
    model = cast(PreTrainedModel, policy)
    weights: dict[str, Tensor] = {}
    for name, tensor in named_weights(policy):
        if rank() == 0:
            weights[name] = tensor.cpu()
    if rank() != 0:
        return
    # A tied layer is left out of the file, which takes that both names share their memory.
    for name, source in model.all_tied_weights_keys.items():
        weights[name] = weights[source]
    part, old = folder.with_name(f"{folder.name}.part"), folder.with_name(f"{folder.name}.old")
    try:
        for leftover in (part, old):
            shutil.rmtree(leftover, ignore_errors=True)
        model.save_pretrained(part, state_dict=weights)
        tokenizer.save_pretrained(part)
        for file in part.iterdir():
            file.chmod(0o644)  # safetensors makes its file readable by its owner alone
        if folder.exists():
            folder.rename(old)
        part.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except Exception as error:  # of a full disk, safetensors raises an error of its own
        shutil.rmtree(part, ignore_errors=True)
        raise RunError(f"the policy could not be written to {folder}: {' '.join(str(error).split())}") from error


def export_checkpoint(checkpoint: Path, folder: Path) -> None:
    """Write the policy of a run's checkpoint into `folder`, as `export` does at the end of that run.

    Raises:
        UsageError: one of the two paths is wrong, or the file is not a checkpoint of the run that it lies in.
        RunError: the folder cannot be written.
    """
    if not checkpoint.is_file():
        raise UsageError(f"{checkpoint}: no such file; give a checkpoint, such as RUN/checkpoints/rollout=000010.ckpt")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is there already and is not an empty folder: give another one")
    configs = [parent / "config.yaml" for parent in checkpoint.absolute().parents[:2]]
    config = next((path for path in configs if path.is_file()), None)
    if config is None:
        raise UsageError(f"{checkpoint} lies in no run folder: there is no {configs[-1]}, which names the model")
    try:
        # On the disk until it is asked for, so that the optimiser's state takes no memory.
        state = torch.load(checkpoint, map_location="cpu", weights_only=False, mmap=True)["state_dict"]
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"{checkpoint} is damaged, or not the checkpoint of a run: {reason}") from error
    options: Any = OmegaConf.to_container(OmegaConf.load(config))
    model = options["model"]
    tokenizer = load_tokenizer(model["path"])
    policy = load_policy(model["path"], attn_implementation=model["attn_implementation"], lora=model["lora"])
    trained = {name.removeprefix("policy."): tensor for name, tensor in state.items()}
    only_adapters = has_adapters(policy)  # the model they were put into is not in a checkpoint
    expected = {name for name in policy.state_dict() if not only_adapters or is_adapter_weight(name)}
    if trained.keys() != expected:
        odd = sorted(trained.keys() ^ expected)[0]
        raise UsageError(f"{checkpoint} is not of the model in {config}: {odd} is in one of them only")
    try:
        policy.load_state_dict(trained, strict=False)
    except RuntimeError as error:
        raise UsageError(f"{checkpoint} is not of the model in {config}: {' '.join(str(error).split())}") from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    export(policy, tokenizer, folder)
