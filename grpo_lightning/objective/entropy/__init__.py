"""entropy: what the entropy of the policy does to the loss of each token, one file per family.

Every option is called with the token losses so far, c * surrogate [N, T], and the mask, and takes by keyword what it
needs of: entropy, logp, old_logp, ratio, advantages, selected (each [N, T]). One that singles tokens out has `select`,
which sees the whole minibatch before it is cut, and finds what it chose in `selected`. A token taken out of the
surrogate stays in the denominators.
"""

from grpo_lightning.objective.entropy.bonus import AdaptiveBonus, Bonus
from grpo_lightning.objective.entropy.covariance import ClipCov, KLCov
from grpo_lightning.objective.entropy.none import NoEntropy
from grpo_lightning.objective.entropy.top import TopEntropy

__all__ = ["AdaptiveBonus", "Bonus", "ClipCov", "KLCov", "NoEntropy", "TopEntropy"]
