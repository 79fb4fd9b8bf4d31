"""The surrogate per token, to be minimised, from the importance ratio rho and the advantage A: one file per family.

Every option is called with ratio, advantages and logp (each [N, T]), some also with mask or old_logp, and returns the
surrogate [N, T]. One with a clip range also has `clipped(ratio, advantages)`: two bool tensors [N, T] that say where a
bound acted, low and high. In PPO's form low acts only where A < 0 and high only where A > 0.
"""

from grpo_lightning.objective.clip.abc import ABC
from grpo_lightning.objective.clip.bounded import DualClip, TwoSidedClip
from grpo_lightning.objective.clip.cispo import CISPO
from grpo_lightning.objective.clip.dcpo import DCPOClip
from grpo_lightning.objective.clip.gmpo import GMPO
from grpo_lightning.objective.clip.none import NoClip, Unclipped
from grpo_lightning.objective.clip.ppo import PPOClip, SymmetricClip
from grpo_lightning.objective.clip.sapo import SAPO

__all__ = [
    "ABC",
    "CISPO",
    "GMPO",
    "SAPO",
    "DCPOClip",
    "DualClip",
    "NoClip",
    "PPOClip",
    "SymmetricClip",
    "TwoSidedClip",
    "Unclipped",
]
