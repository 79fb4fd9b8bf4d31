"""Every option of every group, composed once, and every objective that can be made of them."""

import itertools
from dataclasses import replace
from functools import cache

import torch

from grpo_lightning.objective import Objective, load_objective

OPTIONS = {
    "advantage": ("grpo", "dr_grpo", "rloo", "batch_std", "reinforce_pp", "none"),
    "ratio": ("token", "sequence"),
    "clip": ("symmetric", "higher", "dual", "two_sided", "gspo", "unclipped", "none"),
    "kl": ("none", "k1", "k2", "k3"),
    "loss_norm": ("sequence", "token", "prompt", "constant", "sequence_sum"),
    "overlong": ("none", "soft", "filter", "soft_filter"),
    "sampling": ("all", "dynamic"),
    "correction": ("none", "tis", "icepop", "sequence_mask"),
    "entropy": ("none",),
}
PRESETS = ("grpo", "dapo", "dr_grpo", "gspo", "rloo")


@cache
def option(group: str, name: str):
    """The option as its YAML file gives it; a constant length of 7 where one is needed."""
    overrides = [f"{group}={name}"]
    if name == "constant":
        overrides.append("loss_norm.length=7")
    return getattr(load_objective(overrides), group)


@cache
def plain() -> Objective:
    """grpo advantage, token ratio, symmetric clip, no KL, sequence norm."""
    return load_objective(["kl=none"])


def compose(**names: str) -> Objective:
    """An objective of these options, `plain` in the other groups; as load_objective, without composing again."""
    return replace(plain(), **{group: option(group, name) for group, name in names.items()})


def combinations() -> list[dict[str, str]]:
    """Every loss_norm x clip x kl x ratio that composes."""
    groups = ("loss_norm", "clip", "kl", "ratio")
    every = (dict(zip(groups, names, strict=True)) for names in itertools.product(*(OPTIONS[g] for g in groups)))
    return [names for names in every if not (names["ratio"] == "sequence" and names["clip"] == "none")]


def corrected() -> list[dict[str, str]]:
    """Every correction but none with every loss_norm x ratio, and without a ratio; a KL term beside it."""
    every = itertools.product(OPTIONS["loss_norm"], ("unclipped", "none"), OPTIONS["ratio"], OPTIONS["correction"][1:])
    return [
        {"loss_norm": norm, "clip": clip, "kl": "k3", "ratio": ratio, "correction": correction}
        for norm, clip, ratio, correction in every
        if not (ratio == "sequence" and clip == "none")
    ]


def full(n: int, t: int) -> torch.Tensor:
    return torch.ones(n, t, dtype=torch.bool)


def mask_of(lengths, width: int) -> torch.Tensor:
    """bool [N, width], the first lengths[i] positions of each row."""
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def ratio_of(metric: tuple[torch.Tensor, torch.Tensor]) -> float:
    return (metric[0] / metric[1]).item()
