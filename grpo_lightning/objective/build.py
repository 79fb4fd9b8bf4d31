"""From the configuration of one group to its option."""

from dataclasses import fields, is_dataclass
from importlib import import_module
from inspect import Parameter, signature
from pkgutil import resolve_name
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

PACKAGE = "grpo_lightning.objective"


def build_part(group: str, node: Any) -> tuple[Any, list[str]]:
    """The option that `node` describes by `_target_` and its values, and what should be said about it, a line each.

    A user's own class, chosen by `<group>._target_=my_pkg.MyClass`, inherits the values of the option file in whose
    place it stands. Those that it does not take are left out, and said to be. Raises ValueError naming the group.
    """
    if not isinstance(node, DictConfig) or not isinstance(node.get("_target_"), str):
        raise ValueError(f"the configuration has no {group}._target_")
    values: dict[Any, Any] = OmegaConf.to_container(node, resolve=True)  # type: ignore[assignment]
    target = values["_target_"]
    unknown = _not_taken(group, target, set(values) - {"_target_", "_convert_", "_partial_", "_recursive_"})
    inherited = set() if target.startswith(f"{PACKAGE}.") else unknown & _our_fields(group)
    if wrong := sorted(unknown - inherited):
        raise ValueError(f"{group}.{wrong[0]}: {target} takes no `{wrong[0]}`")
    try:
        part = instantiate({key: value for key, value in values.items() if key not in inherited})
    except InstantiationException as error:
        cause = error.__cause__ or error
        raise ValueError(str(cause) if isinstance(cause, ValueError) else f"{group}: {cause}") from error
    notes = [f"{group}={target} takes no {', '.join(sorted(inherited))}: left out"] if inherited else []
    return part, notes


def _not_taken(group: str, target: str, names: set[Any]) -> set[Any]:
    """Those of `names` that the class or function `target` does not take."""
    try:
        parameters = signature(resolve_name(target)).parameters
    except Exception as error:  # whatever importing the user's module raises
        raise ValueError(f"{group}._target_={target} cannot be loaded: {type(error).__name__}: {error}") from error
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return set()
    return names - set(parameters)


def _our_fields(group: str) -> set[str]:
    """The names of the values that some option of this package takes in `group`."""
    options = vars(import_module(f"{PACKAGE}.{group}")).values()
    return {field.name for option in options if is_dataclass(option) for field in fields(option)}
