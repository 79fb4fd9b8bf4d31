"""Which options go together: what refuses, and what is said aloud, when an objective is composed.

Options describe themselves by plain class attributes; a user's own class needs none of them, `trait` has the defaults.
"""

from typing import Any

from grpo_lightning.objective.checks import keywords

DEFAULTS = {
    "name": "",  # how messages call the option
    "group_baseline": False,  # advantage: compares completions of one group, needs two of them
    "varies_within_row": False,  # advantage: not the same on every token of a row
    "rewards_read": "all",  # advantage: whose total rewards count: all, right (those of right completions) or none
    "positive_rewards": False,  # advantage: refuses negative rewards
    "per_row": False,  # ratio, clip, correction: one number per row
    "of_row": False,  # ratio: its value is that of the row, though the gradient may be that of the token
    "token_ratio": False,  # clip: must see the ratio of each token
    "needs_reference": True,  # kl: the reference policy must be loaded
    "in_reward": False,  # kl: taken off the rewards
    "beta": 1.0,  # kl: its coefficient
    "rows_weigh_equally": True,  # loss_norm: the weights of every row add up to the same
    "drop_truncated": False,  # overlong: truncated rows leave the loss
    "needs_verdicts": False,  # sampling: which completions are correct must be known
    "punishes": True,  # overlong: takes something off the rewards
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
    advantage, ratio, clip = (parts[group] for group in ("advantage", "ratio", "clip"))
    other, lines = named("advantage", advantage), []
    if trait(ratio, "of_row") or trait(ratio, "per_row"):
        this = named("ratio", ratio)
        if trait(clip, "name") == "none":
            lines.append(f"{this} cannot be combined with clip=none, which has no ratio: use clip=unclipped")
        if trait(clip, "token_ratio"):
            lines.append(f"{this} cannot be combined with {named('clip', clip)}, which needs ratio=token")
    for this in _per_row(parts):
        if trait(advantage, "varies_within_row"):
            lines.append(f"{this} cannot be combined with {other}, whose advantage varies within a row")
        elif trait(parts["kl"], "in_reward") and "kl_penalty" in keywords(advantage):
            lines.append(
                f"{this} cannot be combined with {other} and kl.in_reward=true: "
                "folding the KL token by token makes the advantage vary within a row"
            )
    for this in _takes_off_rewards(parts):
        if trait(advantage, "rewards_read") == "none":
            lines.append(f"{other} cannot be combined with {this}, which changes a total reward that it does not read")
        if trait(advantage, "positive_rewards"):
            lines.append(f"{other} cannot be combined with {this}, which makes rewards negative")
    return lines


def _per_row(parts: dict[str, Any]) -> list[str]:
    return [named(group, parts[group]) for group in ("ratio", "clip") if trait(parts[group], "per_row")]


def _takes_off_rewards(parts: dict[str, Any]) -> list[str]:
    kl, overlong = parts["kl"], parts["overlong"]
    folded = [f"{named('kl', kl)} and kl.in_reward=true"] if trait(kl, "in_reward") else []
    return folded + ([named("overlong", overlong)] if trait(overlong, "punishes") else [])


def warnings(parts: dict[str, Any]) -> list[str]:
    """What works but should be said aloud, a line each; `parts` is group -> option."""
    kl, loss_norm, correction = parts["kl"], parts["loss_norm"], parts["correction"]
    other = named("advantage", parts["advantage"])
    estimator, lines = getattr(kl, "estimator", trait(kl, "name")), []
    if estimator == "k1" and not trait(kl, "in_reward"):
        lines.append("kl=k1 in the loss has zero expected gradient: use kl=k2 or kl=k3, or kl.in_reward=true")
    if estimator in ("k3_plus", "k3_corrected") and trait(kl, "in_reward"):
        lines.append(f"kl={estimator} with kl.in_reward=true is kl=k3: it only differs in its gradient")
    for this in _per_row(parts):
        if not trait(loss_norm, "rows_weigh_equally"):
            lines.append(f"{this} with {named('loss_norm', loss_norm)}: rows weigh by their length")
        if trait(correction, "name") in ("tis", "icepop"):
            lines.append(
                f"{this} with {named('correction', correction)}: the tokens of a row share one surrogate, "
                "so the row is weighed by the mean of its factors; correction=sequence_mask has one factor per row"
            )
    if getattr(parts["advantage"], "together", True) is False:
        lines.append(
            f"{other} normalises right and wrong completions apart, as printed in the paper: on average neither is "
            "raised above the other; advantage.together=true raises the right ones"
        )
    if trait(parts["advantage"], "rewards_read") == "none" and "step_rewards" in keywords(parts["advantage"]):
        lines.append(f"{other} learns from the rewards of steps alone: other components of reward have no gradient")
    if trait(parts["advantage"], "rewards_read") == "right":
        for this in _takes_off_rewards(parts):
            lines.append(
                f"{named('advantage', parts['advantage'])} with {this}: the rewards of wrong completions are not read, "
                "so nothing is taken off them"
            )
    return lines
