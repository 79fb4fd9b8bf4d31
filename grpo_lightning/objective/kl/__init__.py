"""kl: an estimate per token of the divergence from the reference policy, d = ref_logp - logp.

The objective adds beta * kl to the loss, or with in_reward takes it off the rewards before the advantages. Options are
called with logp and ref_logp [N, T], one that takes `log_ratio` with logp - old_logp too (0 in the reward).
"""

from grpo_lightning.objective.kl.adaptive import AdaptiveKL
from grpo_lightning.objective.kl.estimators import K1, K2, K3, MAX_LOG_RATIO, Abs
from grpo_lightning.objective.kl.gradient import K3Corrected, K3Plus
from grpo_lightning.objective.kl.none import NoKL

__all__ = ["K1", "K2", "K3", "MAX_LOG_RATIO", "Abs", "AdaptiveKL", "K3Corrected", "K3Plus", "NoKL"]
