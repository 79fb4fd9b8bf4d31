"""loss_norm: the weight w [N, T] of every token, so that loss = sum w * (token losses).

Counted over one whole minibatch (all micro-batches and ranks) from the loss mask m alone: n_i tokens of row i, B rows
with at least one, P groups with such a row, N_q tokens of group q, N tokens in all. Every option is called with mask
[N, T] bool and group_ids [N] int and returns w [N, T] float64.
"""

from grpo_lightning.objective.loss_norm.rows import ConstantNorm, LUSPONorm, RowSumNorm, SequenceNorm, SequenceSumNorm
from grpo_lightning.objective.loss_norm.tokens import PromptNorm, TokenNorm

__all__ = ["ConstantNorm", "LUSPONorm", "PromptNorm", "RowSumNorm", "SequenceNorm", "SequenceSumNorm", "TokenNorm"]
