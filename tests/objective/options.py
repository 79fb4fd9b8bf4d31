"""Every option of every group, composed once, and every objective that can be made of them."""

import itertools
from copy import deepcopy
from dataclasses import replace
from functools import cache

import torch

from grpo_lightning.objective import Objective, load_objective

OPTIONS = {
    "advantage": (
        "grpo", "dr_grpo", "rloo", "batch_std", "reinforce_pp", "none", "process", "gtpo", "grpo_s", "dcpo",
        "reinforce_pp_baseline", "opo", "gpg", "maxrl", "gdpo", "pass_at_k", "raft", "gae",
    ),
    "ratio": ("token", "sequence", "sequence_token", "sequence_arithmetic"),
    "clip": (
        "symmetric", "higher", "dual", "two_sided", "gspo", "unclipped", "none", "cispo", "sapo", "gmpo", "dcpo", "abc",
    ),
    "kl": ("none", "k1", "k2", "k3", "abs", "k3_plus", "k3_corrected", "adaptive", "k1_reward"),
    "loss_norm": ("sequence", "token", "prompt", "constant", "sequence_sum", "luspo", "dcpo"),
    "overlong": ("none", "soft", "filter", "soft_filter"),
    "sampling": ("all", "dynamic", "frontier"),
    "correction": ("none", "tis", "icepop", "sequence_mask"),
    "entropy": ("none", "bonus", "adaptive", "top", "clip_cov", "kl_cov"),
}  # fmt: skip
PRESETS = (
    "grpo", "dapo", "dr_grpo", "gspo", "rloo", "process", "gspo_token", "gtpo", "grpo_s", "dcpo", "cispo", "sapo",
    "gmpo", "reinforce_pp", "reinforce_pp_baseline", "opo", "gpg", "maxrl", "gdpo", "lite_ppo", "pass_at_k", "raft",
    "abc", "ppo", "luspo",
)  # fmt: skip
# Crossed with one another; the others stand once or twice beside a few of these.
CROSSED = {
    "loss_norm": ("sequence", "token", "prompt", "constant", "sequence_sum"),
    "clip": ("symmetric", "higher", "dual", "two_sided", "gspo", "unclipped", "none"),
    "kl": ("none", "k1", "k2", "k3"),
    "ratio": ("token", "sequence"),
}


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
    return deepcopy(replace(plain(), **{group: option(group, name) for group, name in names.items()}))


def combinations() -> list[dict[str, str]]:
    """Every loss_norm x clip x kl x ratio of `CROSSED` that composes, and each other option with a few of these."""
    every = [dict(zip(CROSSED, names, strict=True)) for names in itertools.product(*CROSSED.values())]
    few = {
        "clip": {"ratio": OPTIONS["ratio"][:2], "loss_norm": ("sequence", "token")},
        "ratio": {"clip": ("symmetric", "gspo", "unclipped", "cispo", "sapo", "abc"), "loss_norm": ("token",)},
        "kl": {"ratio": OPTIONS["ratio"][:2], "loss_norm": ("sequence",)},
        "loss_norm": {"ratio": OPTIONS["ratio"][:2], "clip": ("symmetric",)},
    }
    for group, partners in few.items():
        for name, *others in itertools.product(OPTIONS[group][len(CROSSED[group]) :], *partners.values()):
            beside = {"loss_norm": "sequence", "clip": "symmetric", "kl": "none", "ratio": "token"}
            every.append({**beside, **dict(zip(partners, others, strict=True)), group: name})
    return [names for names in every if names["ratio"] == "token" or names["clip"] not in ("none", "gmpo", "dcpo")]


def corrected() -> list[dict[str, str]]:
    """Every correction but none with every crossed loss_norm x ratio, and without a ratio; a KL term beside it."""
    every = itertools.product(CROSSED["loss_norm"], ("unclipped", "none"), CROSSED["ratio"], OPTIONS["correction"][1:])
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
