"""loss_norm=token, loss_norm=prompt: means over tokens, in which a long completion weighs more."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from grpo_lightning.objective.groups import group_index, group_sum
from grpo_lightning.objective.loss_norm.counts import counts


@dataclass(frozen=True)
class TokenNorm:
    """w = m / N: the mean over all tokens.

    A long completion weighs more, and so does a prompt with long completions. The paper of DAPO divides by the tokens
    of each prompt's group instead, so that prompts weigh the same: that is loss_norm=prompt.

    Source: the released code of DAPO (arXiv 2503.14476), whose token mean is over the minibatch.
    """

    name: ClassVar[str] = "token"
    rows_weigh_equally: ClassVar[bool] = False

    def __call__(self, mask: Tensor, group_ids: Tensor) -> Tensor:
        return counts(mask)[0] / mask.sum().clamp(min=1)


@dataclass(frozen=True)
class PromptNorm:
    """w = m / (P N_q): the mean over groups of each group's token mean.

    Within a group a long completion weighs more, but every prompt weighs the same. The released code of DAPO divides by
    the tokens of the whole minibatch instead: that is loss_norm=token.

    Source: DAPO (arXiv 2503.14476), eq. 8 as printed, an expectation over prompts.
    """

    name: ClassVar[str] = "prompt"
    rows_weigh_equally: ClassVar[bool] = False

    def __call__(self, mask: Tensor, group_ids: Tensor) -> Tensor:
        index, groups = group_index(group_ids)
        m = counts(mask)[0]
        tokens = group_sum(m.sum(1), index, groups)
        return m / ((tokens > 0).sum().clamp(min=1) * tokens.clamp(min=1)[index][:, None])
