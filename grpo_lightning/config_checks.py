"""What the blocks of the configuration must be, beside the objective. Each raises UsageError with one line."""

import math

from omegaconf import DictConfig

from grpo_lightning import launch
from grpo_lightning.critic import check_options
from grpo_lightning.errors import UsageError
from grpo_lightning.objective import Objective
from grpo_lightning.objective.pairs import named


def check_reference(cfg: DictConfig, objective: Objective) -> None:
    """Refuse a reference policy that cannot follow the policy."""
    every, mix = cfg.reference.every, cfg.reference.mix
    if not 0 < mix <= 1:
        raise UsageError(f"reference.mix must be in (0, 1] (1: a copy of the policy), got {mix}")
    if every is None:
        if mix != 1:
            raise UsageError(f"reference.mix={mix} does nothing without reference.every, the number of optimiser steps")
        return
    if every < 1:
        raise UsageError(f"reference.every must be a whole number of optimiser steps from 1, or null, got {every}")
    if not objective.needs_reference:
        raise UsageError("reference.every moves the reference policy, but kl=none has none: choose kl=k3, for example")
    if cfg.model.lora.r is not None:
        raise UsageError("reference.every: with model.lora the reference policy is the model without its adapters")
    if cfg.trainer.strategy == "fsdp":
        raise UsageError("reference.every does not go with trainer=fsdp: use trainer=ddp, or reference.every=null")


def check_critic(cfg: DictConfig, objective: Objective) -> None:
    """Refuse a critic that nothing asks, or with numbers out of their ranges."""
    if not cfg.critic:
        return
    if not objective.takes("values"):
        option = named("advantage", objective.advantage)
        raise UsageError(f"{option} takes no values of a critic: advantage=gae, or critic=none")
    if cfg.trainer.strategy == "fsdp":
        raise UsageError("critic does not go with trainer=fsdp: use trainer=ddp, or critic=none")
    if str(cfg.critic.get("_target_")).startswith("grpo_lightning."):
        try:
            check_options(**{name: cfg.critic[name] for name in ("coef", "lr", "epsilon")})
        except ValueError as error:
            raise UsageError(str(error)) from error


def check_processes(cfg: DictConfig) -> None:
    """Refuse a number of processes that the rest of the configuration cannot do with."""
    trainer, engine = cfg.trainer, str(cfg.rollout.engine.get("_target_"))
    if trainer.strategy not in ("auto", "ddp", "fsdp"):
        raise UsageError(f"trainer.strategy must be auto (one process), ddp or fsdp, got {trainer.strategy}")
    if not isinstance(trainer.num_nodes, int) or trainer.num_nodes < 1:
        raise UsageError(f"trainer.num_nodes must be a whole number of at least 1, got {trainer.num_nodes}")
    count = launch.processes(trainer)
    if count > 1 and trainer.strategy == "auto":
        raise UsageError(f"{count} devices (trainer.devices, trainer.num_nodes): add trainer=ddp or trainer=fsdp")
    if trainer.num_nodes > 1 and not launch.started_from_outside():
        raise UsageError(
            f"trainer.num_nodes={trainer.num_nodes}: start the command on every node, through torchrun or srun (README)"
        )
    if count > cfg.rollout.prompts:
        raise UsageError(f"rollout.prompts={cfg.rollout.prompts} is less than the {count} processes: raise it")
    if count > 1 and trainer.strategy == "fsdp" and cfg.rollout.engine.get("weights") == "nccl":
        raise UsageError("rollout.engine.weights=nccl sends from one process alone: with trainer=fsdp, weights=folder")
    if not isinstance(trainer.activation_checkpointing, bool):
        raise UsageError(f"trainer.activation_checkpointing: true or false, got {trainer.activation_checkpointing}")
    if count > 1 and engine.endswith(".VLLMEngine"):
        raise UsageError("rollout=vllm runs in one process alone: rollout=vllm_server, or rollout=hf")


def check_optimizer(optimizer: DictConfig) -> None:
    """Refuse numbers of the optimiser that are out of their ranges."""
    ranges = {"lr": 0.0, "warmup_rollouts": 0, "max_grad_norm": 0.0}
    for name, low in ranges.items():
        value = optimizer[name]
        if name == "max_grad_norm" and value is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value < math.inf:
            raise UsageError(f"optimizer.{name} must be a number of at least {low}, got {value}")
    if optimizer.max_grad_norm == 0:
        raise UsageError("optimizer.max_grad_norm=0 would remove every gradient; null switches clipping off")


def check_profile(profile: object) -> None:
    if not isinstance(profile, bool):
        raise UsageError(f"profile must be true or false, got {profile}")
