"""Advantages A [N, T] from the rewards of whole groups: one file per option."""

from grpo_lightning.objective.advantage.batch_std import BatchStd
from grpo_lightning.objective.advantage.dcpo import DCPO
from grpo_lightning.objective.advantage.dr_grpo import DrGRPO
from grpo_lightning.objective.advantage.gae import GAE
from grpo_lightning.objective.advantage.gdpo import GDPO
from grpo_lightning.objective.advantage.gpg import GPG
from grpo_lightning.objective.advantage.grpo import GRPO
from grpo_lightning.objective.advantage.grpo_s import GRPOS
from grpo_lightning.objective.advantage.gtpo import GTPO
from grpo_lightning.objective.advantage.maxrl import MaxRL
from grpo_lightning.objective.advantage.none import NoBaseline
from grpo_lightning.objective.advantage.opo import OPO
from grpo_lightning.objective.advantage.pass_at_k import PassAtK
from grpo_lightning.objective.advantage.process import Process
from grpo_lightning.objective.advantage.raft import RAFT
from grpo_lightning.objective.advantage.reinforce_pp import ReinforcePP
from grpo_lightning.objective.advantage.reinforce_pp_baseline import ReinforcePPBaseline
from grpo_lightning.objective.advantage.rloo import RLOO

__all__ = [
    "DCPO",
    "GAE",
    "GDPO",
    "GPG",
    "GRPO",
    "GRPOS",
    "GTPO",
    "OPO",
    "RAFT",
    "RLOO",
    "BatchStd",
    "DrGRPO",
    "MaxRL",
    "NoBaseline",
    "PassAtK",
    "Process",
    "ReinforcePP",
    "ReinforcePPBaseline",
]
