"""The algorithm card: the composed objective as one formula, its terms with their numbers and sources."""

import inspect
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from grpo_lightning.objective.checks import keywords
from grpo_lightning.objective.clip import NoClip
from grpo_lightning.objective.correction import NoCorrection
from grpo_lightning.objective.entropy import NoEntropy
from grpo_lightning.objective.kl import NoKL
from grpo_lightning.objective.objective import Objective
from grpo_lightning.objective.overlong import NoPunishment
from grpo_lightning.objective.pairs import named, trait
from grpo_lightning.objective.sampling import SampleAll

# In the order in which they act; each with its symbol in the formula.
SYMBOLS = {
    "sampling": "",
    "overlong": "r",
    "advantage": "A",
    "ratio": "rho",
    "clip": "l",
    "correction": "c",
    "entropy": "h",
    "kl": "kl",
    "loss_norm": "w",
}


class Term(NamedTuple):
    """What the docstring of an option says: its formula, with the numbers in place of their names, and its source."""

    formula: str
    source: str


def term(option: Any) -> Term:
    """The first paragraph of the option's docstring, and what stands behind "Source:". Both may be empty."""
    text = inspect.getdoc(type(option)) or ""
    first = " ".join(re.split(r"\n\s*\n|Sources?:", text, maxsplit=1)[0].split())
    found = re.search(r"Sources?: (.+?)(?:\n\s*\n|\Z)", text, re.DOTALL)
    values = {k: v for k, v in vars(option).items() if isinstance(v, int | float) and not isinstance(v, bool)}
    if values:
        pattern = r"(?<![\w.])(" + "|".join(sorted(values, key=len, reverse=True)) + r")(?![\w(])"
        first = re.sub(pattern, lambda match: f"{values[match[1]]:g}", first)
    if trait(option, "drop_truncated"):
        first = f"{first} Truncated rows leave the loss."
    if estimator := getattr(option, "estimator", None):
        first = first.replace("estimator", estimator, 1)
    return Term(first, " ".join(found[1].split()) if found else "")


def formula(objective: Objective) -> str:
    """The loss with the terms that are there."""
    surrogate = "l" if isinstance(objective.correction, NoCorrection) else "c l"
    if not isinstance(objective.entropy, NoEntropy):
        surrogate = f"h({surrogate})"
    if not objective.needs_reference or objective.kl_in_reward:
        return f"loss = sum_{{i,t}} w_{{i,t}} {surrogate}_{{i,t}}"
    return f"loss = sum_{{i,t}} w_{{i,t}} ( {surrogate}_{{i,t}} + kl_{{i,t}} )"


def terms(objective: Objective, choices: Mapping[str, str] | None = None) -> list[tuple[str, str, Term]]:
    """(symbol, option, term) for every group that does something, in the order in which they act.

    choices: group -> option, as chosen by Hydra; without it options are called by what they call themselves.
    """
    rows = []
    for group, symbol in SYMBOLS.items():
        option = getattr(objective, group)
        if isinstance(option, (NoCorrection, NoEntropy, NoKL, SampleAll)) or option == NoPunishment():
            continue
        if group == "ratio" and isinstance(objective.clip, NoClip):
            continue  # there is no ratio
        ours = type(option).__module__.startswith("grpo_lightning.")  # a user's own is not what stood in its place
        name = f"{group}={choices[group]}" if ours and choices and group in choices else named(group, option)
        what = term(option)
        if trait(option, "in_reward"):
            by_token = "kl_penalty" in keywords(objective.advantage)
            taken = "r_{i,t} -= kl_{i,t}, token by token" if by_token else "r_i -= sum_t kl_{i,t}"
            what = what._replace(formula=f"{what.formula} {taken}.")
        rows.append((symbol, name, what))
    return rows
