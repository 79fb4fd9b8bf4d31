"""From the command line to a checked configuration. Wrong usage is one line, before any model is loaded."""

import difflib
import hashlib
import inspect
import itertools
import json
import math
import os
import re
import sys
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_lightning.config_checks import check_critic, check_optimizer, check_processes, check_profile, check_reference
from grpo_lightning.errors import UsageError
from grpo_lightning.lora import check_lora
from grpo_lightning.objective import Objective
from grpo_lightning.objective.correction import NoCorrection
from grpo_lightning.objective.load import compose, conf_dir

# Names from elsewhere and things that are refused, each with where to go instead.
HINTS = {
    "model.lora.dropout": "dropout is off: a ratio of two dropout masks is not an importance ratio",
    "clipping": "the group is called clip: write clip=...",
    "lr": "did you mean optimizer.lr?",
    "trainer.gradient_clip_val": "use optimizer.max_grad_norm",
    "trainer.max_steps": "trainer.max_epochs counts rollouts",
    "trainer.max_time": "trainer.max_epochs counts rollouts",
    "trainer.accumulate_grad_batches": "use update.micro_batch_tokens (it never changes the gradient)",
    **{
        f"rollout.{name}": "training rollouts sample from the full softmax, which the importance ratio assumes"
        for name in ("top_p", "top_k", "min_p")
    },
}


@dataclass
class RolloutOptions:
    engine: Any
    prompts: int
    group_size: int
    max_new_tokens: int
    temperature: float
    ahead: int
    launch: bool = True  # these two of rollout=vllm_server alone
    url: str | None = None


@dataclass
class UpdateOptions:
    epochs: int
    minibatches: int
    micro_batch_tokens: int
    share_prompts: bool
    skip_silent: str
    old_logp: str


@dataclass
class EvalOptions:
    prompts: int
    samples: int
    every: int
    reward: dict[str, Any] = field(default_factory=dict)


@dataclass
class CheckpointOptions:
    every: int
    keep: int
    best: str | None


@dataclass
class ReferenceOptions:
    every: int | None
    mix: float


@dataclass
class LoraOptions:
    r: int | None
    alpha: float | None
    target_modules: Any


@dataclass
class ModelOptions:
    path: str
    lr: float
    max_new_tokens: int
    attn_implementation: str | None
    compile: bool
    liger: bool
    lora: LoraOptions


PLAIN_BLOCKS = {
    "rollout": RolloutOptions,
    "update": UpdateOptions,
    "eval": EvalOptions,
    "checkpoint": CheckpointOptions,
    "reference": ReferenceOptions,
    "model": ModelOptions,
}
TYPED = "GRPO_LIGHTNING_OVERRIDES"
AT_LEAST_ONE = (
    "rollout.prompts", "rollout.group_size", "rollout.max_new_tokens", "update.epochs", "update.minibatches",
    "update.micro_batch_tokens", "eval.prompts", "eval.samples", "eval.every", "checkpoint.every", "checkpoint.keep",
    "trainer.max_epochs",
)  # fmt: skip


def normalise(arguments: list[str]) -> list[str]:
    """Spell out what the short forms mean.

    data.path=... chooses data=file and model.path=... chooses model=hf, unless an option is named; eval.reward=... is
    Hydra's reward@eval.reward=...; resume=PATH goes on in PATH with the options the run there was started with.
    """

    def given(name: str) -> bool:
        return any(argument.startswith(f"{name}=") for argument in arguments)

    result: list[str] = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key == "eval.reward":
            argument = f"reward@eval.reward={value}"
        if key == "resume" and value not in ("auto", "null", ""):
            folder = Path(value)
            if not (folder / "overrides.yaml").exists():
                raise UsageError(f"resume={value}: no run to go on with there (it has no overrides.yaml)")
            earlier = OmegaConf.load(folder / "overrides.yaml")
            result = [o for o in map(str, earlier) if not o.startswith(("resume=", "hydra.run.dir="))] + result
            argument = "resume=auto"
            result.append(f"hydra.run.dir={quote(value)}")
        result.append(argument)
    if "resume=auto" in arguments and not given("hydra.run.dir") and not {"-m", "--multirun"} & set(arguments):
        raise UsageError(
            "resume=auto goes on with the run in hydra.run.dir: give hydra.run.dir=FOLDER, or resume=FOLDER"
        )
    # Last, and so behind flags such as -m: the parser wants the overrides in one piece.
    implied = [("data", "file"), ("model", "hf")]
    return result + [f"{g}={option}" for g, option in implied if given(f"{g}.path") and not given(g)]


def quote(value: str) -> str:
    """A value for an override, whatever characters it has (folders of a sweep have = and ,)."""
    # Hydra reads a backslash as an escape only where backslashes stand before a quote.
    return "'" + re.sub(r"(\\*)(')", r"\1\1\\\2", value) + "'"


def compose_checked(overrides: list[str]) -> DictConfig:
    """Compose the training configuration and check it.

    Raises:
        UsageError: with one line that says what is wrong, where, and what would be right.
    """
    try:
        cfg = compose("train", overrides)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UsageError(explain(error, overrides)) from error
    check(cfg)
    return cfg


def check(cfg: DictConfig) -> Objective:
    """Check the values and pairs of a composed configuration; returns the objective it describes."""
    known = set(_reference_keys([])) | {"sweep", "resume"}
    for key in map(str, cfg):
        if key not in known:
            raise UsageError(f"{key}: no such option{_nearest(key, known)}")
    for key in sorted(OmegaConf.missing_keys(cfg)):
        raise UsageError(f"{key} is missing: give {key}=...")
    for name, schema in PLAIN_BLOCKS.items():
        _check_block(cfg, name, schema)
    for name in AT_LEAST_ONE:
        value = OmegaConf.select(cfg, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{name} must be a whole number of at least 1, got {value}")
    if not isinstance(cfg.seed, int) or not 0 <= cfg.seed < 2**32:
        raise UsageError(f"seed must be a whole number from 0 to 2^32 - 1, got {cfg.seed}")
    if not 0 < cfg.rollout.temperature < math.inf:
        raise UsageError(
            f"rollout.temperature must be above 0 (rollouts are sampled, not greedy), got {cfg.rollout.temperature}"
        )
    check_optimizer(cfg.optimizer)
    monitored = ["val/accuracy", "val/greedy", f"val/pass@{cfg.eval.samples}", "val/reward"]
    if cfg.checkpoint.best not in (None, *monitored):
        raise UsageError(f"checkpoint.best must be null or one of {', '.join(monitored)}, got {cfg.checkpoint.best}")
    update = cfg["update"]  # cfg.update is a method of DictConfig
    if update.minibatches > cfg.rollout.prompts:
        raise UsageError(
            f"update.minibatches={update.minibatches} is more than rollout.prompts={cfg.rollout.prompts}: "
            "a minibatch is made of whole groups"
        )
    if update.skip_silent not in ("none", "backward", "all"):
        raise UsageError(f"update.skip_silent must be none, backward or all, got {update.skip_silent}")
    if update.old_logp not in ("trainer", "sampler"):
        raise UsageError(f"update.old_logp must be trainer or sampler, got {update.old_logp}")
    if cfg.rollout.ahead not in (0, 1):
        raise UsageError(f"rollout.ahead must be 0 or 1, got {cfg.rollout.ahead}")
    for name in ("launch", "url"):
        if name in cfg.rollout and name not in cfg.rollout.engine:
            raise UsageError(f"rollout.{name} belongs to rollout=vllm_server")
    if cfg.rollout.ahead and "launch" not in cfg.rollout:
        raise UsageError("rollout.ahead=1 samples while the policy is updated, which needs rollout=vllm_server")
    if cfg.trainer.precision not in ("32-true", "bf16-mixed", 32, "32"):
        raise UsageError(
            f"trainer.precision={cfg.trainer.precision}: 32-true or bf16-mixed; weights in half precision lose "
            "updates of the size that reinforcement learning makes"
        )
    for key, value in cfg.trainer.items():
        if f"trainer.{key}" in HINTS and value is not None:
            raise UsageError(f"trainer.{key} is not used here: {HINTS[f'trainer.{key}']}")
    check_processes(cfg)
    check_profile(cfg.profile)
    check_lora(**cfg.model.lora)
    if ".rollout.vllm" in str(cfg.rollout.engine.get("_target_")) and not 0.01 <= cfg.rollout.temperature <= 2:
        raise UsageError(f"rollout.temperature must be in [0.01, 2] with vLLM, got {cfg.rollout.temperature}")
    if not cfg.reward:
        raise UsageError("reward is empty: name at least one component, such as reward=[exact]")
    try:
        objective = Objective.from_config(cfg)
        objective.check_group_size(cfg.rollout.group_size)
        if update.old_logp == "sampler" and not isinstance(objective.correction, NoCorrection):
            raise UsageError(
                "update.old_logp=sampler takes the sampler for the old policy, so there is nothing to correct: "
                "correction=none, or update.old_logp=trainer"
            )
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(_first_line(error.__cause__ or error)) from error
    except (ValueError, TypeError) as error:
        raise UsageError(_first_line(error)) from error
    check_reference(cfg, objective)
    check_critic(cfg, objective)
    return objective


def _check_block(cfg: DictConfig, name: str, schema: type) -> None:
    block: Any = OmegaConf.to_container(cfg[name], resolve=True)
    allowed = {f.name for f in fields(schema)}
    for key in block:
        if key not in allowed:
            hint = HINTS.get(f"{name}.{key}")
            raise UsageError(f"{name}.{key}: no such option" + (f"; {hint}" if hint else _nearest(key, allowed)))
    try:
        OmegaConf.merge(OmegaConf.structured(schema), block)
    except OmegaConfBaseException as error:
        raise UsageError(f"{name}.{error.full_key}: {_first_line(error)}") from error


def explain(error: Exception, overrides: list[str]) -> str:
    """One line for an error of composing, with the nearest valid name."""
    text = str(error)
    if missing := re.search(r"Could not (?:find|load) '([^']+)/([^'/]*)'", text):
        group, option = missing.groups()
        known = sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))
        return f"{group}={option}: no such option{_nearest(option, known)} (there are: {', '.join(known)})"
    if unknown := re.search(r"Could not override '([^']+)'|Key '([^']+)' is not in struct", text):
        key = unknown.group(1) or unknown.group(2)
        if key in HINTS:
            return f"{key}: no such option; {HINTS[key]}"
        others = [o for o in overrides if not o.lstrip("+~").startswith(f"{key}=")]
        return f"{key}: no such option{_where(key, _reference_keys(others, deep=True))}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: not of the form name=value ({_first_line(error)})"
    return _first_line(error)


def _where(key: str, known: list[str]) -> str:
    """Where a dotted key that does not exist might belong."""
    group, _, name = key.rpartition(".")
    owners = sorted(
        path.stem for path in (conf_dir() / group).glob("*.yaml") if name in list(OmegaConf.load(path).keys())
    )
    if group and owners:
        return f" of the {group} chosen; it belongs to " + " and ".join(f"{group}={owner}" for owner in owners)
    siblings = [k for k in known if group and k.rpartition(".")[0] == group]
    guess = _nearest(key, known)
    return guess or (f" ({group} has: {', '.join(s.rpartition('.')[2] for s in siblings)})" if siblings else "")


def _reference_keys(overrides: list[str], deep: bool = False) -> list[str]:
    """Names that a valid configuration has; all dotted paths if `deep`."""
    try:
        cfg = compose("train", overrides)
    except (HydraException, OmegaConfBaseException, ValueError):
        cfg = compose("train", [])
    keys = [str(key) for key in cfg] + ["algorithm", "experiment"]
    return keys + list(_paths(cfg)) if deep else keys


def _paths(node: DictConfig, prefix: str = "") -> Iterable[str]:
    for key in map(str, node):
        if OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key) or not OmegaConf.is_dict(node[key]):
            if key != "_target_":
                yield f"{prefix}{key}"
        else:
            yield from _paths(node[key], f"{prefix}{key}.")


def _nearest(name: str, known: Iterable[str]) -> str:
    """A key of the same last name under another parent (`prompts` for `rollout.prompts`), else one that looks alike."""
    known = list(known)
    same_last = [key for key in known if key != name and key.rpartition(".")[2] == name]
    parent = name.partition(".")[0] if "." in name else ""
    alike = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    close = same_last or [key for key in alike if not parent or "." in key]
    return f"; did you mean {close[0]}?" if close else ""


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def check_types(target: Callable[..., Any], options: dict[str, Any], where: str) -> None:
    """Refuse a value that is not of the plain type its constructor names: Hydra passes on whatever was typed.

    Raises:
        UsageError: naming the option, e.g. "data.size must be int, got 'abc'".
    """
    try:
        hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except NameError:  # annotations that their own library imports for type checkers only
        return
    for name, value in options.items():
        allowed = typing.get_args(hint) or (hint,) if (hint := hints.get(name)) is not None else ()
        if not allowed or not all(kind in (int, float, bool, str, type(None)) for kind in allowed):
            continue
        right = any(
            isinstance(value, (int, float) if kind is float else kind) and (kind is bool) == isinstance(value, bool)
            for kind in allowed
        )
        if not right:
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in allowed)
            raise UsageError(f"{where}.{name} must be {names}, got {value!r}")


def sweep_points(overrides: list[str], limit: int = 64) -> list[list[str]]:
    """The override lists of the first `limit` jobs of a sweep over plain choices. A sweep over intervals, which only
    an optimising sweeper understands, is checked at its default."""
    options: list[list[str]] = []
    for override in OverridesParser.create().parse_overrides(overrides):
        if not override.is_sweep_override():
            options.append([str(override.input_line)])
        elif override.is_discrete_sweep():
            options.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
    return [list(point) for point in itertools.islice(itertools.product(*options), limit)]


def register_resolvers() -> None:
    """The two names that conf/train.yaml gives to sweep folders."""
    # Where a launcher runs jobs in processes or on machines of its own, they are resolved there, under another argv.
    os.environ[TYPED] = json.dumps([a for a in sys.argv[1:] if not a.startswith(("hydra", "-"))])
    OmegaConf.register_new_resolver("sweep_name", lambda: folder_name(",".join(_overrides())), replace=True)
    OmegaConf.register_new_resolver("job_name", job_name, replace=True)


def _overrides() -> list[str]:
    return json.loads(os.environ[TYPED])


def job_name(dirname: str) -> str:
    """The folder of a sweep's job: what is swept over, or all its overrides where the command line names no sweep."""
    swept = {o.key_or_group for o in OverridesParser.create().parse_overrides(_overrides()) if o.is_sweep_override()}
    parts = re.split(r",(?=[^,=]+=)", dirname)
    return folder_name(",".join(part for part in parts if not swept or part.partition("=")[0] in swept))


def folder_name(text: str) -> str:
    """A short folder name for override text: safe characters, and a hash where something had to be cut."""
    safe = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", text) or "default"
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return safe if len(safe) <= 100 and safe == text else f"{safe[:90]}_{digest}"
