"""The choice that rollout=auto makes."""

import importlib.util
from typing import Any

import torch

from grpo_lightning.launch import started_from_outside
from grpo_lightning.rollout.engine import Engine
from grpo_lightning.rollout.hf import HFEngine
from grpo_lightning.rollout.vllm import VLLMEngine


def auto_choice(accelerator: str) -> tuple[str, str]:
    """What rollout=auto takes under `trainer.accelerator`, "vllm" or "hf", and why."""
    if accelerator == "cpu":
        return "hf", "training on the CPU"
    if not torch.cuda.is_available():
        return "hf", "no CUDA GPU"
    if importlib.util.find_spec("vllm") is None:
        return "hf", "vLLM is not installed"
    if started_from_outside():
        return "hf", "there are several processes; rollout=vllm_server samples on GPUs of its own"
    return "vllm", "vLLM is installed and there is a CUDA GPU"


def auto_engine(
    accelerator: str,
    max_rows: int,
    model: str,
    precision: str | int,
    max_model_len: int | None,
    gpu_memory_utilization: float,
    options: dict[str, Any],
) -> Engine:
    """The engine of rollout=auto: the options of both, of which the one chosen takes its own."""
    if auto_choice(accelerator)[0] == "hf":
        return HFEngine(max_rows)
    return VLLMEngine(model, precision, max_model_len, gpu_memory_utilization, options)
