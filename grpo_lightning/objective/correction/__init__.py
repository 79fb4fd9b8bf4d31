"""correction: a factor c on the surrogate, for a sampler that is not quite the old policy.

The engine that samples and the trainer compute the same policy with other kernels, or in another precision, so they
differ in every token by d = old_logp - sampler_logp. The factor is made of the importance ratio exp(d) between the two.
It has no gradient and leaves the KL term and the weights w alone: a token with c = 0 stays in the denominators.

An option that truncates or masks also has `changed`, called like the option: where c is not the plain ratio, bool
[N, T]. `per_row` says that this is one answer per row, so that its statistics count rows instead of tokens.
"""

from grpo_lightning.objective.correction.masked import IcePop, SequenceMask
from grpo_lightning.objective.correction.none import NoCorrection
from grpo_lightning.objective.correction.ratio import sampler_ratio
from grpo_lightning.objective.correction.tis import TIS

__all__ = ["TIS", "IcePop", "NoCorrection", "SequenceMask", "sampler_ratio"]
