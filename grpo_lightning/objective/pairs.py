"""Which options go together: what refuses, and what is said aloud, when an objective is composed.

Options describe themselves by plain class attributes; a user's own class needs none of them, `trait` has the defaults.
"""

from typing import Any

from grpo_lightning.objective.checks import keywords

DEFAULTS = {
    "name": "",  # how messages call the option
    "group_baseline": False,  # advantage: compares completions of one group, needs two of them
    "varies_within_row": False,  # advantage: not the same on every token of a row
    "per_row": False,  # ratio, clip, correction: one number per row
    "needs_reference": True,  # kl: the reference policy must be loaded
    "in_reward": False,  # kl: taken off the rewards
    "beta": 1.0,  # kl: its coefficient
    "rows_weigh_equally": True,  # loss_norm: the weights of every row add up to the same
    "drop_truncated": False,  # overlong: truncated rows leave the loss
    "needs_verdicts": False,  # sampling: which completions are correct must be known
    "differentiates": False,  # entropy: a term of the loss, so that the gradient goes through it
}


def trait(option: Any, name: str) -> Any:
    """The attribute of an option, or its default where a user's own class has none."""
    return getattr(option, name, DEFAULTS[name])


def named(group: str, option: Any) -> str:
    """How a message names an option: `clip=none`, or the class where it is the user's own."""
    return f"{group}={trait(option, 'name') or type(option).__name__}"


def refusals(parts: dict[str, Any]) -> list[str]:
    """What cannot work together, a line each with both names; `parts` is group -> option."""
    if not trait(parts["ratio"], "per_row"):
        return []
    advantage = parts["advantage"]
    ratio, other = named("ratio", parts["ratio"]), named("advantage", advantage)
    lines = []
    if trait(parts["clip"], "name") == "none":
        lines.append(f"{ratio} cannot be combined with clip=none, which has no ratio: use clip=unclipped")
    if trait(advantage, "varies_within_row"):
        lines.append(f"{ratio} cannot be combined with {other}, whose advantage varies within a row")
    if trait(parts["kl"], "in_reward") and "kl_penalty" in keywords(advantage):
        lines.append(
            f"{ratio} cannot be combined with {other} and kl.in_reward=true: "
            "folding the KL token by token makes the advantage vary within a row"
        )
    return lines


def warnings(parts: dict[str, Any]) -> list[str]:
    """What works but should be said aloud, a line each; `parts` is group -> option."""
    ratio, kl, loss_norm, correction = parts["ratio"], parts["kl"], parts["loss_norm"], parts["correction"]
    lines = []
    if trait(kl, "name") == "k1" and not trait(kl, "in_reward"):
        lines.append("kl=k1 in the loss has zero expected gradient: use kl=k2 or kl=k3, or kl.in_reward=true")
    if trait(ratio, "per_row") and not trait(loss_norm, "rows_weigh_equally"):
        lines.append(f"{named('ratio', ratio)} with {named('loss_norm', loss_norm)}: rows weigh by their length")
    if trait(ratio, "per_row") and trait(correction, "name") in ("tis", "icepop"):
        lines.append(
            f"{named('ratio', ratio)} with {named('correction', correction)}: the tokens of a row share one surrogate, "
            "so the row is weighed by the mean of its factors; correction=sequence_mask has one factor per row"
        )
    return lines
