"""The objective: plain tensor code, composed by Hydra groups, usable without the rest of the package."""

from grpo_lightning.objective.load import load_objective
from grpo_lightning.objective.objective import LossOutput, Objective

__all__ = ["LossOutput", "Objective", "load_objective"]
