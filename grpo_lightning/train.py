"""`python train.py ...` and `grpo-train ...`: compose, check, run, return the metric."""

import contextlib
import logging
import os
import resource
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

# Read once, when the libraries are imported. Threads that wait by spinning make a run on a busy machine several times
# slower, since the ones they wait for cannot get a core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own words, in the middle of the progress lines
os.environ.setdefault("WANDB_SILENT", "true")

import hydra
import torch
import transformers
from hydra._internal.utils import get_args
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from lightning.pytorch.trainer.states import TrainerStatus
from omegaconf import DictConfig
from rich.console import Console

from grpo_lightning import config, distributed, launch
from grpo_lightning.build import Run, build
from grpo_lightning.callbacks.checkpoint import newest_readable
from grpo_lightning.callbacks.stop import Stop, StopRequest, requeue
from grpo_lightning.card import card
from grpo_lightning.errors import RunError, UsageError
from grpo_lightning.export import export
from grpo_lightning.objective import Objective
from grpo_lightning.objective.load import conf_dir
from grpo_lightning.run_folder import RunFolder, read_summary
from grpo_lightning.sweep import INTERRUPTED, SweepTable, run_child

log = logging.getLogger(__name__)


def _quiet() -> None:
    """Leave the terminal to this program: what the libraries say about themselves is not news to its user."""
    logging.raiseExceptions = False  # a message that cannot be written to train.log is no reason for a traceback
    transformers.utils.logging.disable_progress_bar()
    for name in ("lightning.pytorch", "lightning.fabric", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*")
    warnings.filterwarnings("ignore", message=".*sync_dist=True.*")  # every process has the values of all


# The rest of summary.json; null in a run that failed before it was built.
FIGURES = (
    "steps", "rollouts", "resumed_from_step", "val_accuracy_start", "val_accuracy", "val_greedy_start", "val_greedy",
    "reward_mean", "tokens_generated", "tokens_trained", "seconds", "peak_rss_gb",
)  # fmt: skip


def main() -> None:
    """The command. Exit code 0: done; 1: something happened in the run; 2: wrong usage; 130: interrupted."""
    sys.path.insert(0, os.getcwd())  # a user's own parts lie where the command is typed
    launch.end_with_parent()
    try:
        sys.argv[1:] = config.normalise(sys.argv[1:])
        arguments = get_args(sys.argv[1:])
        informing = (arguments.help, arguments.hydra_help, arguments.info, arguments.cfg, arguments.shell_completion)
        if not any(informing):
            points = config.sweep_points(arguments.overrides) if arguments.multirun else [arguments.overrides]
            for point in points:
                config.compose_checked([o for o in point if not o.startswith("hydra")])
            _check_writable(arguments.overrides, "hydra.sweep.dir" if arguments.multirun else "hydra.run.dir")
    except UsageError as error:
        _say("wrong usage", error)
        sys.exit(2)
    config.register_resolvers()
    SweepTable.failed = 0
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="train")(job)()
    except KeyboardInterrupt:  # of a sweep: the job that was running has said so
        sys.exit(INTERRUPTED)
    sys.exit(1 if SweepTable.failed else 0)


def _check_writable(overrides: list[str], key: str) -> None:
    """Refuse a folder that cannot be written: Hydra, which makes it, would answer with a traceback."""
    given = [o.value() for o in OverridesParser.create().parse_overrides(overrides) if o.key_or_group == key]
    folder = Path(str(given[-1]).partition("${")[0] if given else "outputs").absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{key}={folder} cannot be written: {there} is no folder that this user may write to")
    if not folder.exists():
        try:  # a file system may refuse what the permissions allow
            folder.mkdir(parents=True)
            folder.rmdir()
        except OSError as error:
            raise UsageError(f"{key}={folder} cannot be made: {error}") from error


def job(cfg: DictConfig) -> float | None:
    """One job: a run, or, in a sweep, a child process that is a run."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return run_child()
    path = Path(HydraConfig.get().runtime.output_dir)
    count = launch.devices(cfg.trainer)
    if count > 1 and not launch.started_from_outside():
        summary, code = _run_processes(count, path)
    elif launch.processes(cfg.trainer) > 1 and not _given("hydra.run.dir"):
        _say("wrong usage", "processes that torchrun or srun starts need one run folder: give hydra.run.dir=FOLDER")
        sys.exit(2)
    else:
        summary, code = run(cfg, path)
    if code:
        sys.exit(code)
    return summary.get("val_accuracy")


def _given(key: str) -> bool:
    return any(override.startswith(f"{key}=") for override in HydraConfig.get().overrides.hydra)


def _run_processes(count: int, path: Path) -> tuple[dict[str, Any], int]:
    """The run in one process per device. Process 0 writes what it leaves behind, as long as it can."""
    ended = launch.launch([*_overrides(), f"hydra.run.dir={config.quote(str(path))}"], count)
    codes, first = ended.codes, ended.first
    if ended.stopped and any(code < 0 for code in codes) and all(code <= 0 or code == INTERRUPTED for code in codes):
        # Stopped before they could take the signal, or once more while they were ending.
        summary = {**(read_summary(path) or {}), "status": "interrupted", "message": "stopped by the user"}
        RunFolder(path).write_summary(summary)
        _say("interrupted", f"resume={path} goes on from its newest checkpoint, if it has one")
        return summary, INTERRUPTED
    failures = {number: path / f"failure.{number}.txt" for number in range(count)}
    said = {number: file.read_text() for number, file in failures.items() if file.exists()}
    for file in failures.values():
        file.unlink(missing_ok=True)
    if first is None or codes[first] == INTERRUPTED:
        return read_summary(path) or {}, codes[0]
    # The others failed since this one was gone, so what they say is beside the point.
    reason = f"ended by signal {-codes[first]}" if codes[first] < 0 else said.get(first, f"ended with {codes[first]}")
    message = reason if codes[first] == 2 else f"process {first} of {count}: {reason}"
    summary = {**(read_summary(path) or {}), "status": "failed", "message": message}
    RunFolder(path).write_summary(summary)
    _say("wrong usage" if codes[first] == 2 else "the run failed", message)
    return summary, max(1, codes[first])


def run(cfg: DictConfig, path: Path) -> tuple[dict[str, Any], int]:
    """Train as `cfg` says in the folder `path`. Returns the summary, which is also written, and the exit code."""
    _quiet()
    if distributed.rank() > 0:  # one process speaks for all
        logging.disable(logging.WARNING)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    with StopRequest() as stop:
        summary, code = _run(cfg, path, stop)
    if stop.wants_requeue and code == INTERRUPTED and distributed.rank() == 0:
        if cfg.resume == "auto":
            _say("interrupted", requeue())
        else:
            _say("interrupted", "not requeued: the command line has to have resume=auto and a hydra.run.dir=FOLDER")
    return summary, code


def _run(cfg: DictConfig, path: Path, stop: StopRequest) -> tuple[dict[str, Any], int]:
    folder, started = RunFolder(path), None
    summary: dict[str, Any] = {"status": "failed", "message": "", **_identity(cfg), **dict.fromkeys(FIGURES)}
    code = 1
    try:
        objective = config.check(cfg)
        checkpoint = folder.open(cfg, _overrides(), resume=cfg.resume == "auto")
        earlier = read_summary(path) or {}
        done = folder.rollout_of(checkpoint) if checkpoint else 0
        if done >= cfg.trainer.max_epochs and earlier.get("status") == "completed":
            _say("nothing to do", f"{path} has {done} rollouts; raise trainer.max_epochs")
            return earlier, 0
        if done > cfg.trainer.max_epochs:
            raise UsageError(f"trainer.max_epochs={cfg.trainer.max_epochs}: the run in {path} has {done} rollouts")
        started = build(cfg, objective, folder, _overrides(), stop, _card(cfg, objective))
        _fit(started, resume=checkpoint is not None)
        summary |= {"status": "completed", "message": ""}
        code = 0
    except UsageError as error:
        summary["message"], code = str(error), 2
        _say("wrong usage", error)
    except (Stop, KeyboardInterrupt, SystemExit):
        summary |= {"status": "interrupted", "message": "stopped by the user"}
        code = INTERRUPTED
        _say("interrupted", _how_to_go_on(cfg, folder))
    except Exception as error:
        summary["message"] = _one_line(error)
        if not isinstance(error, RunError):
            with contextlib.suppress(OSError):  # a full disk is no reason to say nothing
                file = path / (f"traceback.{distributed.rank()}.txt" if distributed.rank() else "traceback.txt")
                file.write_text(traceback.format_exc())
                summary["message"] += f" (see {file})"
        _say("the run failed", summary["message"])
    finally:
        if code in (1, 2) and launch.PARENT in os.environ:
            with contextlib.suppress(OSError):
                (path / f"failure.{os.environ['LOCAL_RANK']}.txt").write_text(summary["message"])
        stop.at_once = False
        if started is not None:
            summary |= _figures(started)
            if started.profile is not None:
                summary["profile"] = started.profile.report()
            started.close()
        # A mistake in the command that resumes a run leaves the summary of that run alone.
        if folder.begun or code == 0 or not folder.holds_run():
            try:
                folder.write_summary(summary)
            except OSError as error:
                if code == 0:  # otherwise something was said already, most likely the same
                    _say("summary.json could not be written", error)
    if code == 0:
        Console(highlight=False, soft_wrap=True, markup=False).print(f"run folder: {path}")
    return summary, code


def _fit(run: Run, resume: bool) -> None:
    checkpoint = None
    if resume:
        checkpoint, run.resumed_from_step = newest_readable(run.folder, run.module)
        log.info("resuming from %s (step %d)", checkpoint, run.resumed_from_step)
        # A checkpoint is this run's own file, and holds more than tensors: the rows of surplus groups. Lightning does
        # not pass weights_only=False on to trainer=fsdp.
        os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    run.trainer.fit(run.module, run.loader, ckpt_path=checkpoint, weights_only=False)
    if run.recorder.rollouts != run.trainer.max_epochs and not run.trainer.should_stop:
        # Lightning takes a StopIteration, from wherever it comes, for the end of training.
        raise RuntimeError(f"training ended after {run.recorder.rollouts} of {run.trainer.max_epochs} rollouts")
    if run.trainer.state.status == TrainerStatus.FINISHED:
        export(run.module.policy, run.tokenizer, run.folder.checkpoints / "model")


def _how_to_go_on(cfg: DictConfig, folder: RunFolder) -> str:
    if cfg.sweep:
        return "the same sweep typed again goes on"
    if folder.all_checkpoints():
        return f"resume={folder.path} goes on from its newest checkpoint"
    return f"there is no checkpoint yet: resume={folder.path} starts from the beginning"


def _overrides() -> list[str]:
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def _card(cfg: DictConfig, objective: Objective) -> str:
    choices = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    return card(cfg, objective, choices)


def _identity(cfg: DictConfig) -> dict[str, Any]:
    choices = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    groups = [
        "advantage",
        "ratio",
        "clip",
        "kl",
        "loss_norm",
        "overlong",
        "sampling",
        "correction",
        "entropy",
        "critic",
        "reward",
        "algorithm",
    ]
    algorithm = {group: choices.get(group) for group in groups}
    for group in groups:
        target = str((cfg.get(group) or {}).get("_target_", "grpo_lightning."))
        if not target.startswith("grpo_lightning."):  # a user's own, in the place of the option that was chosen
            algorithm[group] = target
    algorithm["reward"] = "+".join(cfg.reward)
    return {"algorithm": algorithm, "engine": None, "seed": cfg.seed}


def _figures(run: Run) -> dict[str, Any]:
    start = run.evaluation.start
    last = run.evaluation.last if run.evaluation.rollout else {}  # nothing yet but the validation before training
    figures = {
        "engine": run.engine.name,
        "steps": run.trainer.global_step,
        "rollouts": run.recorder.rollouts,
        "rollouts_without_step": run.recorder.rollouts_without_step,
        "resumed_from_step": run.resumed_from_step,
        "val_accuracy_start": start.get("val/accuracy"),
        "val_accuracy": last.get("val/accuracy"),
        "val_greedy_start": start.get("val/greedy"),
        "val_greedy": last.get("val/greedy"),
        "reward_mean": run.recorder.reward_mean,
        "tokens_generated": run.rollouts.tokens_generated,
        "tokens_trained": run.module.tokens_trained,
        "prompts_skipped": run.prompts_skipped,
        "seconds": run.module.clock.seconds(run.recorder.seconds),
        "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    if torch.cuda.is_available():
        figures["peak_cuda_gb"] = torch.cuda.max_memory_allocated() / 2**30
    return figures


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines and not isinstance(error, RunError) else " ".join(lines)


def _say(what: str, message: object) -> None:
    failed = what in ("wrong usage", "the run failed")
    if launch.PARENT in os.environ and failed:
        return  # the one that started this process says what the first to fail has left
    if distributed.rank() > 0 and not failed:
        return  # process 0 says the same
    Console(stderr=True, highlight=False, soft_wrap=True, markup=False).print(f"grpo_lightning: {what}: {message}")


if __name__ == "__main__":
    main()
