"""Build a run from its configuration: data, model, rewards, engine, module, callbacks, trainer."""

import inspect
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, cast

import hydra
import lightning as L
import torch
import wandb
from hydra.errors import HydraException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from grpo_lightning import config, distributed, launch
from grpo_lightning.callbacks import (
    Checkpoint,
    EvaluationCallback,
    Profile,
    RandomStates,
    Recorder,
    RolloutCallback,
    SamplerCheck,
    StopRequest,
)  # fmt: skip
from grpo_lightning.data.prompts import PromptStream, tokenize
from grpo_lightning.errors import UsageError
from grpo_lightning.evaluation import evaluate
from grpo_lightning.lora import has_adapters
from grpo_lightning.model import eos_token_ids, hasten, load_policy, load_tokenizer
from grpo_lightning.module import GRPOModule
from grpo_lightning.objective import Objective
from grpo_lightning.objective.entropy import KLCov
from grpo_lightning.objective.pairs import named, trait
from grpo_lightning.reward import RewardSet
from grpo_lightning.rollout.auto import auto_choice
from grpo_lightning.rollout.buffer import RolloutBuffer
from grpo_lightning.rollout.collect import Collector
from grpo_lightning.rollout.engine import Elsewhere, Engine, SamplingParams
from grpo_lightning.run_folder import RunFolder

log = logging.getLogger(__name__)

PATIENCE = timedelta(hours=12)
VLLM_SERVER = "grpo_lightning.rollout.vllm_server.VLLMServerEngine"
TEMPLATE_OPTIONS = ("template", "system_prompt", "chat", "max_prompt_tokens", "long_prompts")


@dataclass
class Run:
    """Everything that takes part in a run."""

    trainer: L.Trainer
    module: GRPOModule
    loader: DataLoader[int]
    tokenizer: Any
    engine: Engine
    rewards: RewardSet
    eval_rewards: RewardSet
    rollouts: RolloutCallback
    evaluation: EvaluationCallback
    recorder: Recorder
    folder: RunFolder
    prompts_skipped: int
    profile: Profile | None
    resumed_from_step: int = 0

    def close(self) -> None:
        """Give back processes and files, whatever happened before."""
        self.engine.close()
        self.rewards.close()
        self.eval_rewards.close()
        if wandb.run is not None:
            wandb.finish()


def build(
    cfg: DictConfig,
    objective: Objective,
    folder: RunFolder,
    overrides: list[str],
    stop: StopRequest | None = None,
    card: str = "",
) -> Run:
    """Build the run that `cfg` (composed from `overrides`) describes: cheap checks of the input first, the model last.

    It ends early where `stop` is asked to. The algorithm card is printed, and written down.

    Raises:
        UsageError: something in the options or the input files is wrong.
    """
    L.seed_everything(cfg.seed, verbose=False)
    for warning in objective.warnings:
        log.warning(warning)
    options = {name: cfg.data[name] for name in TEMPLATE_OPTIONS}
    source = instantiate({k: v for k, v in cfg.data.items() if k not in TEMPLATE_OPTIONS}, "data")
    train_items, val_items = source.load(cfg.eval.prompts)
    if not val_items:
        raise UsageError(f"eval.prompts={cfg.eval.prompts}: the data has no held-out prompts")
    rewards, eval_rewards = _rewards(cfg, has_answers=any(item.answer is not None for item in val_items))
    _check_rewards(objective, rewards)
    tokenizer = load_tokenizer(cfg.model.path)
    prompts, skipped = tokenize(train_items, tokenizer, **options)
    val_prompts, val_skipped = tokenize(val_items, tokenizer, **options)
    if skipped + val_skipped:
        log.warning("%d prompts are longer than data.max_prompt_tokens and were skipped", skipped + val_skipped)
    stream = PromptStream(prompts, cfg.seed)
    stream.check(cfg.rollout.prompts)

    policy = load_policy(cfg.model.path, attn_implementation=cfg.model.attn_implementation, lora=_plain(cfg.model.lora))
    hasten(policy, compile=cfg.model.compile, liger=cfg.model.liger)
    if cfg.trainer.activation_checkpointing:
        # The other kind, reentrant, gives no gradient to adapters behind a frozen input.
        kind = {"use_reentrant": False}
        cast(PreTrainedModel, policy).gradient_checkpointing_enable(gradient_checkpointing_kwargs=kind)
    _check_room(policy, max(len(p.token_ids) for p in prompts + val_prompts), cfg.rollout.max_new_tokens)
    reference = None
    if objective.needs_reference and not has_adapters(policy):
        reference = load_policy(cfg.model.path, attn_implementation=cfg.model.attn_implementation)
        hasten(reference, compile=cfg.model.compile, liger=cfg.model.liger)
    engine = build_engine(cfg, folder)
    steps = cfg["update"].epochs * cfg["update"].minibatches
    if isinstance(objective.entropy, KLCov) and steps == 1 and not cfg.rollout.ahead:
        log.warning("entropy=kl_cov does nothing with one optimiser step a rollout: set update.minibatches or .epochs")
    critic = None
    if objective.takes("values") and not cfg.critic and cfg.advantage.get("lam", 1) < 1:
        log.warning("advantage=gae without a critic: advantage.lam=%g discounts the reward", cfg.advantage.lam)
    if cfg.critic:
        make_critic = instantiate({**_plain(cfg.critic), "_partial_": True}, "critic")
        critic = make_critic(policy, path=cfg.model.path, attn_implementation=cfg.model.attn_implementation)
    buffer = RolloutBuffer(cfg["update"].epochs, cfg["update"].minibatches, cfg.seed)
    module = GRPOModule(
        policy,
        objective,
        buffer,
        _optimizer(cfg.optimizer),
        reference=reference,
        temperature=cfg.rollout.temperature,
        micro_batch_tokens=cfg["update"].micro_batch_tokens,
        share_prompts=cfg["update"].share_prompts,
        skip_silent=cfg["update"].skip_silent,
        max_grad_norm=cfg.optimizer.max_grad_norm,
        warmup_rollouts=cfg.optimizer.warmup_rollouts,
        old_logp=cfg["update"].old_logp,
        critic=critic,
        reference_every=cfg.reference.every,
        reference_mix=cfg.reference.mix,
    )
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    params = SamplingParams(cfg.rollout.max_new_tokens, cfg.rollout.temperature, eos_token_ids(policy, tokenizer))
    collector = Collector(
        engine=engine,
        stream=stream,
        rewards=rewards,
        objective=objective,
        sampling=params,
        prompts_per_rollout=cfg.rollout.prompts,
        group_size=cfg.rollout.group_size,
        seed=cfg.seed,
        needs_old_logp=len(buffer) > 1,
        score=module.score,
        decode=decode,
        clock=module.clock,
        old_logp=cfg["update"].old_logp,
        has_critic=critic is not None,
        kept_weights=module.kept_weights,
    )
    run_evaluation = partial(
        evaluate, engine, val_prompts, eval_rewards, params, decode, samples=cfg.eval.samples, seed=cfg.seed
    )
    rollouts = RolloutCallback(collector, folder, ahead=cfg.rollout.ahead == 1)
    evaluation = EvaluationCallback(engine, run_evaluation, every=cfg.eval.every, folder=folder)
    val_names = ["accuracy", "greedy", "reward", "length_mean", "truncated_fraction", f"pass@{cfg.eval.samples}"]
    recorder = Recorder(folder, [f"val/{name}" for name in val_names], partial(folder.begin, cfg, overrides, card=card))
    extra = [instantiate(options, f"callbacks.{name}") for name, options in cfg.callbacks.items()]
    stop = stop or StopRequest()
    checkpoint = Checkpoint(
        folder, stop, every=cfg.checkpoint.every, keep=cfg.checkpoint.keep, best=cfg.checkpoint.best
    )
    check = SamplerCheck(cfg.trainer.precision)
    profile = None
    if cfg.profile:
        profile = Profile(
            folder,
            module.clock,
            lambda: {"generate": rollouts.tokens_generated, "update": module.tokens_trained},
        )
    measured = [] if profile is None else [profile]
    trainer = _trainer(
        cfg, folder, card, [stop, *measured, RandomStates(), rollouts, evaluation, recorder, check, *extra, checkpoint]
    )
    if card:
        log.info("%s", card)
    log.info(_headline(cfg, policy, engine, trainer, len(prompts), len(val_prompts), eval_rewards))
    # The loader yields minibatch numbers; the rows are in the buffer, which the rollout callback fills.
    # Its own generator: a loader draws a number whenever it is begun, which a resumed run does another number of times.
    loader: DataLoader[int] = DataLoader(range(len(buffer)), batch_size=None, generator=torch.Generator())  # type: ignore[arg-type]
    return Run(
        trainer, module, loader, tokenizer, engine, rewards, eval_rewards, rollouts, evaluation, recorder, folder,
        skipped + val_skipped, profile,
    )  # fmt: skip


def _check_room(policy: nn.Module, longest_prompt: int, max_new_tokens: int) -> None:
    config: Any = policy.config
    room, why = getattr(config, "max_position_embeddings", None), "positions of the model"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Beyond them the rotary frequencies change for all rows of a batch, those that are short included.
        room = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", room)
        why = "positions up to which the model's longrope embeddings are the same for every row"
    if isinstance(room, int) and longest_prompt + max_new_tokens > room:
        raise UsageError(
            f"a prompt of {longest_prompt} tokens and rollout.max_new_tokens={max_new_tokens} do not fit in the {room} "
            f"{why}: lower rollout.max_new_tokens or set data.max_prompt_tokens"
        )


def instantiate(options: Any, where: str) -> Any:
    """Hydra's instantiate; a constructor's complaint becomes one line that names the option."""
    # Resolved where the options stand: a copy without its parents would look interpolations up in itself.
    plain: Any = OmegaConf.to_container(options, resolve=True) if OmegaConf.is_config(options) else dict(options)
    try:
        target = hydra.utils.get_object(plain.get("_target_", ""))
    except Exception as error:
        raise UsageError(f"{where}._target_={plain.get('_target_')} cannot be imported: {error}") from error
    config.check_types(target, plain, where)
    try:
        return hydra.utils.instantiate(plain, _convert_="all")
    except HydraException as error:
        cause = error.__cause__
        if isinstance(cause, UsageError):
            raise cause from error
        message = str(cause or error).strip().splitlines()[0]
        raise UsageError(f"{where}: {message}") from error


def _trainer(cfg: DictConfig, folder: RunFolder, card: str, callbacks: list[L.Callback]) -> L.Trainer:
    options = {
        "log_every_n_steps": 1,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        "default_root_dir": folder.path,
        **_plain(cfg.trainer),
        "devices": launch.devices(cfg.trainer),
        "strategy": _strategy(cfg.trainer),
    }
    del options["activation_checkpointing"]
    try:
        return L.Trainer(**options, callbacks=callbacks, logger=build_loggers(cfg, folder, card))
    except (TypeError, ValueError, MisconfigurationException) as error:
        hint = "" if torch.cuda.is_available() else " (there is no CUDA GPU here: trainer=cpu)"
        raise UsageError(f"trainer: {' '.join(str(error).split())}{hint}") from error


def _strategy(trainer: DictConfig) -> Strategy | str:
    """Processes wait for each other as long as one generates or scores longer than the others: hours, not minutes."""
    if trainer.strategy == "ddp":
        return DDPStrategy(timeout=PATIENCE, forward_sync_buffers=False)
    if trainer.strategy == "fsdp":
        # One file a checkpoint, whatever the number of processes, so that another number can go on from it.
        return ModelParallelStrategy(
            data_parallel_size=launch.processes(trainer), tensor_parallel_size=1, save_distributed_checkpoint=False,
            timeout=PATIENCE,
        )  # fmt: skip
    return "auto"


def build_engine(cfg: DictConfig, folder: RunFolder) -> Engine:
    """The rollout engine of the configuration; what rollout=auto takes is in rollout/auto.py."""
    options = _plain(cfg.rollout.engine)
    if options["_target_"] == VLLM_SERVER and distributed.rank() > 0:
        return Elsewhere("vllm_server")
    if "log" in options and options["log"] is None:
        options["log"] = str(folder.path / "vllm_server.log")
    return instantiate(options, "rollout.engine")


def build_loggers(cfg: DictConfig, folder: RunFolder, card: str = "") -> list[Logger]:
    """The loggers of `logger`, with wandb offline unless the user is logged in."""
    loggers = []
    for name, options in cfg.logger.items():
        options = dict(options)
        if name == "wandb":
            options["save_dir"] = str(folder.path)
            options.setdefault("name", folder.path.name)
            options["mode"] = wandb_mode(options.get("mode", "auto"))
            options.setdefault("id", folder.wandb_id())  # a resumed run goes on in the same run there
        logger = instantiate(options, f"logger.{name}")
        logger.log_hyperparams({**_plain(cfg), "algorithm_card": card})
        loggers.append(logger)
    return loggers


def wandb_mode(mode: str) -> str:
    """auto: what WANDB_MODE says, else online with an API key at hand, else offline."""
    if mode != "auto":
        return mode
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"]
    return "online" if wandb.login(prompt=False) else "offline"


def _rewards(cfg: DictConfig, has_answers: bool) -> tuple[RewardSet, RewardSet]:
    rewards = RewardSet({name: instantiate(options, f"reward.{name}") for name, options in cfg.reward.items()})
    chosen = dict(cfg.eval.get("reward") or {}) or {
        name: options for name, options in cfg.reward.items() if rewards.components[name].correctness
    }
    if not chosen:
        if not has_answers:
            raise UsageError(
                f"reward=[{','.join(cfg.reward)}] has no component that tells right from wrong, and the data has no "
                "answers: choose what validates with eval.reward=..."
            )
        chosen = {"exact": {"_target_": "grpo_lightning.reward.exact.Exact", "weight": 1.0}}
        log.info("no component of reward tells right from wrong: validating with eval.reward=exact")
    eval_rewards = RewardSet({name: instantiate(options, f"eval.reward.{name}") for name, options in chosen.items()})
    if not eval_rewards.has_correctness:
        raise UsageError(f"eval.reward=[{','.join(chosen)}] has no component that tells right from wrong")
    return rewards, eval_rewards


def _check_rewards(objective: Objective, rewards: RewardSet) -> None:
    """Refuse an objective that is made of what no component of `reward` gives."""
    chosen = f"reward=[{','.join(rewards.components)}]"
    sampling, advantage = (named(group, getattr(objective, group)) for group in ("sampling", "advantage"))
    for option, needed in (
        (advantage, objective.needs("correct")),
        (sampling, trait(objective.sampling, "needs_verdicts")),
    ):
        if needed and not rewards.has_correctness:
            raise UsageError(
                f"{option} needs to know right from wrong, which no component of {chosen} tells: add exact"
            )
    if objective.needs("step_rewards") and not rewards.judges_steps:
        more = f"reward=[{','.join([*rewards.components, 'process'])}]"
        raise UsageError(f"{advantage} needs rewards of steps, which nothing in {chosen} gives: for example {more}")


def _optimizer(options: DictConfig) -> Any:
    plain = {k: v for k, v in _plain(options).items() if k not in ("warmup_rollouts", "max_grad_norm")}
    try:
        taken = inspect.signature(hydra.utils.get_class(plain["_target_"])).parameters
    except Exception as error:
        raise UsageError(f"optimizer._target_={plain['_target_']} cannot be imported: {error}") from error
    for name in ("betas", "weight_decay"):  # what the default optimiser has and another may not
        if name not in taken and plain.pop(name, None) is not None:
            log.info("optimizer._target_=%s takes no %s: left out", plain["_target_"], name)
    factory = instantiate({**plain, "_partial_": True}, "optimizer")

    def make(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return factory(list(parameters))

    try:
        make([nn.Parameter(torch.zeros(1))])  # before the model is loaded
    except (TypeError, ValueError) as error:
        allowed = ", ".join(list(inspect.signature(factory.func).parameters)[1:])
        raise UsageError(f"optimizer: {error} ({factory.func.__name__} takes {allowed})") from error
    return make


def _plain(options: DictConfig) -> dict[str, Any]:
    return dict(OmegaConf.to_container(options, resolve=True))  # type: ignore[arg-type]


def _headline(
    cfg: DictConfig, policy: nn.Module, engine: Engine, trainer: L.Trainer, train: int, val: int, evals: RewardSet
) -> str:
    parameters = sum(p.numel() for p in policy.parameters())
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    size = f"{parameters:,} parameters" + (f", {trained:,} trained" if trained < parameters else "")
    chosen_by_auto = str(cfg.rollout.engine.get("_target_", "")).endswith(".auto_engine")
    why = f"rollout=auto: {auto_choice(cfg.trainer.accelerator)[1]}" if chosen_by_auto else "as chosen"
    device = trainer.strategy.root_device.type
    return (
        f"model {cfg.model.path} ({size}) on {device}, rollouts through {engine.name} ({why}); "
        f"{train} training prompts, {val} held out, validated by {'+'.join(evals.components)}"
    )
