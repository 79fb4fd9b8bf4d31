"""Rewards: a score per completion for each named component, added up by weight."""

from grpo_lightning.reward.score import Component, RewardBatch, RewardResult, RewardSet, Step

__all__ = ["Component", "RewardBatch", "RewardResult", "RewardSet", "Step"]
