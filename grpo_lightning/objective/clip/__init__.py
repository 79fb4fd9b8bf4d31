"""The surrogate per token, to be minimised, from the importance ratio rho and the advantage A: one file per family.

Every option is called with ratio, advantages and logp (each [N, T]) and returns the surrogate [N, T]. One with a clip
range also has `clipped(ratio, advantages)`: two bool tensors [N, T] that say where it clipped, low (only where A < 0)
and high (only where A > 0).
"""

from grpo_lightning.objective.clip.bounded import DualClip, TwoSidedClip
from grpo_lightning.objective.clip.none import NoClip, Unclipped
from grpo_lightning.objective.clip.ppo import PPOClip, SymmetricClip

__all__ = ["DualClip", "NoClip", "PPOClip", "SymmetricClip", "TwoSidedClip", "Unclipped"]
