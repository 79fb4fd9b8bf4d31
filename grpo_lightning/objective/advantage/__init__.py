"""Advantages A [N, T] from the rewards of whole groups: one file per option."""

from grpo_lightning.objective.advantage.batch_std import BatchStd
from grpo_lightning.objective.advantage.dr_grpo import DrGRPO
from grpo_lightning.objective.advantage.grpo import GRPO
from grpo_lightning.objective.advantage.none import NoBaseline
from grpo_lightning.objective.advantage.reinforce_pp import ReinforcePP
from grpo_lightning.objective.advantage.rloo import RLOO

__all__ = ["GRPO", "RLOO", "BatchStd", "DrGRPO", "NoBaseline", "ReinforcePP"]
