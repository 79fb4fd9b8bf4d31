"""Metrics of one rollout, over every completion that was drawn for it, whether or not its group was kept."""

import math

import torch
from torch import Tensor

from grpo_lightning.rollout.groups import Group


def nan_mean(values: Tensor) -> float:
    """Mean of the entries that are not NaN; NaN when there is none (a missing value is not a zero)."""
    present = values[~values.isnan()]
    return float(present.mean()) if len(present) else math.nan


def nan_std(values: Tensor) -> float:
    """Unbiased standard deviation of the entries that are not NaN; NaN when there are fewer than two."""
    present = values[~values.isnan()]
    return float(present.std()) if len(present) > 1 else math.nan


def rollout_metrics(groups: list[Group]) -> dict[str, float]:
    """Raw rewards (before shaping), correctness, lengths and group statistics. The names never vary between rollouts.

    `train/accuracy` is the share of correct completions; lengths are in tokens; NaN stands for "none such".
    """
    rewards = torch.cat([group.task_rewards for group in groups])
    correct = torch.tensor(
        [math.nan if value is None else float(value) for group in groups for value in group.correct],
        dtype=torch.float64,
    )
    lengths = torch.tensor([row.length for group in groups for row in group.rows], dtype=torch.float64)
    metrics = {"reward/mean": nan_mean(rewards), "reward/std": nan_std(rewards), "train/accuracy": nan_mean(correct)}
    for name in groups[0].components:
        values = torch.cat([group.components[name] for group in groups])
        metrics[f"reward/{name}/mean"] = nan_mean(values)
        metrics[f"reward/{name}/missing_fraction"] = float(values.isnan().double().mean())
    flat = [_is_flat(group.task_rewards) for group in groups]
    right = [all(value is True for value in group.correct) for group in groups]
    wrong = [all(value is False for value in group.correct) for group in groups]
    metrics |= {
        "group/zero_std_fraction": sum(flat) / len(groups),
        "group/all_right_fraction": sum(right) / len(groups),
        "group/all_wrong_fraction": sum(wrong) / len(groups),
        "completion/length_mean": float(lengths.mean()),
        "completion/length_right": nan_mean(torch.where(correct == 1, lengths, math.nan)),
        "completion/length_wrong": nan_mean(torch.where(correct == 0, lengths, math.nan)),
        "completion/truncated_fraction": float(torch.cat([g.truncated for g in groups]).double().mean()),
    }
    return metrics


def _is_flat(rewards: Tensor) -> bool:
    present = rewards[~rewards.isnan()]
    return len(present) == 0 or bool(present.max() == present.min())
