"""The algorithm card of a run: what is optimised, in one readable text."""

from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grpo_lightning.objective import Objective
from grpo_lightning.objective.card import formula, terms
from grpo_lightning.objective.load import compose
from grpo_lightning.objective.objective import GROUPS


def card(cfg: DictConfig, objective: Objective, choices: Mapping[str, str]) -> str:
    """The objective of `cfg` as a formula, its terms with their numbers and sources, and what differs from the preset.

    choices: group -> option, of the composition of `cfg`.
    """
    rows = [(symbol, name, what.formula, what.source) for symbol, name, what in terms(objective, choices)]
    rewards = " + ".join(f"{options.get('weight', 1):g} {name}" for name, options in cfg.reward.items())
    rows.insert(0, ("r", "reward", f"r_i = {rewards}", ""))
    if objective.takes("values"):
        rows.append(("V", f"critic={choices.get('critic', '')}", *_critic(cfg.critic)))
    wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"algorithm={choices.get('algorithm', '?')}  {formula(objective)}"]
    for symbol, name, text, source in rows:
        lines.append(f"  {symbol:<{wide[0]}}  {name:<{wide[1]}}  {text}".rstrip())
        if source:
            lines.append(f"  {'':<{wide[0]}}  {'':<{wide[1]}}  [{source}]")
    different = differences(cfg, choices)
    lines.append("  differs from the preset: " + (", ".join(different) if different else "nothing"))
    update, rollout = cfg["update"], cfg.rollout
    steps = update.epochs * update.minibatches
    lines.append(
        f"  P = {rollout.prompts} prompts, G = {rollout.group_size} completions of at most {rollout.max_new_tokens} "
        f"tokens at temperature {rollout.temperature:g}, {steps} optimiser step{'s' * (steps > 1)} a rollout, "
        f"learning rate {cfg.optimizer.lr:g}"
    )
    if cfg.reference.every:
        lines.append(
            f"  reference policy: after every {cfg.reference.every} steps, at a rollout end, "
            f"{cfg.reference.mix:g} policy + {1 - cfg.reference.mix:g} reference"
        )
    return "\n".join(lines)


def _critic(options: DictConfig) -> tuple[str, str]:
    """What the values are and how they are trained, and its source."""
    if not options:
        return "V = 0", ""
    error, near = "(V - R)^2", options.get("epsilon")
    if near is not None:
        error = f"max((V - R)^2, (clip(V, V_old - {near:g}, V_old + {near:g}) - R)^2)"
    rate = "that of the policy" if options.get("lr") is None else f"{options.lr:g}"
    what = f"loss += {options.get('coef', 1):g} / N sum_{{i,t}} 1/2 {error}, R = A + V_old, learning rate {rate}"
    return what, "PPO (arXiv 1707.06347), eq. 9; clipped as in its released code"


def differences(cfg: DictConfig, choices: Mapping[str, str]) -> list[str]:
    """Options and values of the objective that the preset alone would not have given, as they would be typed."""
    preset = choices.get("algorithm")
    if preset is None:
        return []
    plain = compose("train", [f"algorithm={preset}"], with_hydra=True)
    theirs = plain.hydra.runtime.choices
    found = []
    for group in (*GROUPS, "critic"):
        if choices.get(group) is None:  # not chosen from the options of the group
            continue
        if choices.get(group) != theirs.get(group):
            found.append(f"{group}={choices.get(group)}")
            base: Any = compose("train", [f"algorithm={preset}", f"{group}={choices.get(group)}"])[group]
        else:
            base = plain[group]
        found += _values(group, _plain(cfg[group]), _plain(base))
    return found


def _plain(node: Any) -> dict[Any, Any]:
    """The values as they were written: one taken from elsewhere in the configuration is no difference."""
    return dict(OmegaConf.to_container(node, resolve=False))  # type: ignore[arg-type]


def _values(group: str, ours: dict[Any, Any], theirs: dict[Any, Any]) -> Iterable[str]:
    for key in sorted(ours.keys() | theirs.keys(), key=str):
        if ours.get(key) != theirs.get(key):
            yield f"{group}.{key}={ours.get(key)}"
