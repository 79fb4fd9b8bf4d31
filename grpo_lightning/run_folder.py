"""What a run leaves behind: config.yaml, metrics.csv, rollouts/, validation/, checkpoints/, summary.json and more."""

import csv
import gzip
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from omegaconf import DictConfig, OmegaConf

from grpo_lightning.distributed import rank
from grpo_lightning.errors import RunError, UsageError

# What a resumed run may change: how long, how fast and how it is shown, and the optimiser's numbers.
MAY_CHANGE = (
    "trainer.", "optimizer.", "checkpoint.", "eval.every", "update.micro_batch_tokens", "update.share_prompts",
    "update.skip_silent", "model.compile", "model.liger", "rollout.engine.", "logger", "callbacks", "resume", "sweep",
    "model.lr", "profile",
)  # fmt: skip


LARGE_TRACE = 20 * 2**20


class RunFolder:
    """The folder of one run. Files that are replaced are written beside their place and moved, never half written.

    Of several processes only the first one writes; the others read what is there before it begins.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rollouts, self.validation, self.checkpoints = (path / n for n in ("rollouts", "validation", "checkpoints"))
        self.profile = path / "profile"
        self.begun = False
        self.config: dict[str, Any] = {}  # of the run that goes on here now
        self._header: list[str] | None = None
        self._writer = ThreadPoolExecutor(1, "write")
        self._writing: Future[None] | None = None

    def open(self, cfg: DictConfig, overrides: list[str], resume: bool) -> Path | None:
        """Prepare the folder; returns the newest checkpoint to go on from, or None to start from the beginning.

        Nothing that is there is changed before `begin`.

        Raises:
            UsageError: the folder holds a run and `resume` is off, or it cannot be written.
        """
        checkpoints = self.all_checkpoints()
        self.config = _plain(cfg)
        if not resume and self.holds_run():
            raise UsageError(
                f"hydra.run.dir={self.path} already holds a run: resume=auto goes on with it, "
                "another hydra.run.dir starts a new one"
            )
        if resume and checkpoints and (self.path / "config.yaml").exists():
            self.check_same(_plain(OmegaConf.load(self.path / "config.yaml")), self.path)
        try:
            for folder in (self.rollouts, self.validation, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            if not checkpoints:
                self._write_config(cfg, overrides)
        except OSError as error:
            raise UsageError(f"hydra.run.dir={self.path} cannot be written: {error}") from error
        return checkpoints[-1] if resume and checkpoints else None

    def holds_run(self) -> bool:
        """Whether something was computed here."""
        return (self.path / "metrics.csv").exists() or any(self.validation.glob("*.jsonl"))

    def check_same(self, before: dict[str, Any], where: Path) -> None:
        """Refuse to go on with another objective, model or data than in `before`, the configuration at `where`."""
        for key in _differences(before, self.config):
            if not key.startswith(MAY_CHANGE):
                raise UsageError(
                    f"{key} differs from the run in {where}, which can only go on as it was: leave it out, "
                    "or start a new run in another hydra.run.dir"
                )

    @staticmethod
    def rollout_of(checkpoint: Path) -> int:
        """The rollout that a checkpoint was written after."""
        return int(checkpoint.stem.partition("=")[2])

    def checkpoint_of(self, rollout: int) -> Path:
        return self.checkpoints / f"rollout={rollout:06d}.ckpt"

    def all_checkpoints(self) -> list[Path]:
        """From the oldest to the newest: they are named by rollout."""
        return sorted(self.checkpoints.glob("rollout=*.ckpt"))

    def begin(self, cfg: DictConfig, overrides: list[str], step: int, rollout: int, card: str = "") -> None:
        """Training begins, at `step` and after `rollout` (0 and 0, or those of a checkpoint that has been loaded).

        What a stopped run wrote beyond that is removed: it will be written again.
        """
        self.begun = True
        if rank() > 0:
            return
        with _reporting(self.path):
            self._write_config(cfg, overrides)
            _write(self.path / "card.txt", card + "\n")
            for folder in (self.path, self.rollouts, self.validation, self.checkpoints, self.profile):
                for cut_off in folder.glob("*.part"):
                    shutil.rmtree(cut_off) if cut_off.is_dir() else cut_off.unlink()
            table = self.path / "metrics.csv"
            if table.exists():
                with table.open(newline="") as file:
                    rows = list(csv.reader(file))
                at = rows[0].index("step")
                kept = [rows[0], *(row for row in rows[1:] if len(row) == len(rows[0]) and int(row[at]) <= step)]
                _write(table, "".join(",".join(row) + "\n" for row in kept))
                self._header = rows[0]
            self.remove_rollouts_after(rollout)
            for damaged in self.all_checkpoints():  # a newer one that could be read would have been gone on from
                if self.rollout_of(damaged) > rollout:
                    damaged.replace(damaged.with_name(damaged.name + ".damaged"))

    def remove_rollouts_after(self, rollout: int) -> None:
        """Of rollouts that were not trained on, or will be done again, nothing stays."""
        self.finish_writing()
        for folder in (self.rollouts, self.validation):
            for written in folder.glob("*.jsonl"):
                if rank() == 0 and int(written.stem) > rollout:
                    written.unlink()

    def _write_config(self, cfg: DictConfig, overrides: list[str]) -> None:
        _write(self.path / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
        _write(self.path / "overrides.yaml", OmegaConf.to_yaml(OmegaConf.create(overrides)))

    def write_metrics(self, row: dict[str, Any], known: list[str]) -> None:
        """Append one row and flush it. The first row fixes the header: `known` and whatever else that row has."""
        if rank() > 0:
            return
        table = self.path / "metrics.csv"
        if self._header is None:
            self._header = list(dict.fromkeys([*known, *row]))
            with _reporting(table):
                _write(table, ",".join(self._header) + "\n")
        unknown = [name for name in row if name not in self._header]
        if unknown:
            raise RuntimeError(f"metrics.csv has a fixed header and no column for {', '.join(unknown)}")
        with _reporting(table):
            size = table.stat().st_size
            try:
                with table.open("a", newline="") as file:
                    csv.writer(file, lineterminator="\n").writerow([_cell(row.get(name)) for name in self._header])
                    file.flush()
                    os.fsync(file.fileno())
            except OSError:
                os.truncate(table, size)  # rather no row than half a row
                raise

    def write_rows(self, folder: Path, number: int, records: list[dict[str, Any]]) -> None:
        """One JSON object a line in `folder`/NNNNNN.jsonl."""
        path = folder / f"{number:06d}.jsonl"
        with _reporting(path):
            _write(path, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))

    def start_writing_rows(self, folder: Path, number: int, records: list[dict[str, Any]]) -> None:
        """As `write_rows`, in a thread. The records must stay as they are until `finish_writing`."""
        self.finish_writing()
        self._writing = self._writer.submit(self.write_rows, folder, number, records)

    def finish_writing(self) -> None:
        """Wait for what `start_writing_rows` began; raises what `write_rows` does."""
        if (writing := self._writing) is not None:
            writing.exception()  # a signal may end this waiting, but not the writing
            self._writing = None
            writing.result()

    def write_checkpoint(self, path: Path, checkpoint: dict[str, Any]) -> None:
        """Write a checkpoint with the configuration it was made with."""
        with _reporting(path):
            _replace(path, lambda file: torch.save(checkpoint | {"config": self.config}, file))

    def write_best(self, record: dict[str, Any]) -> None:
        """Which rollout best.ckpt is of, and its value."""
        path = self.checkpoints / "best.json"
        with _reporting(path):
            _write(path, json.dumps(record) + "\n")

    def write_profile(self, text: str) -> None:
        """profile.md: where the time went."""
        with _reporting(self.path / "profile.md"):
            _write(self.path / "profile.md", text)

    def write_trace(self, export: Callable[[str], object]) -> None:
        """profile/trace.json, which `export` writes under the name it is given; trace.json.gz if it is large."""
        path = self.profile / "trace.json"
        beside = path.with_name(path.name + ".part")
        with _reporting(path):
            self.profile.mkdir(exist_ok=True)
            for old in self.profile.glob("trace.json*"):
                old.unlink()
            export(str(beside))
            if beside.stat().st_size <= LARGE_TRACE:
                beside.replace(path)
                return
            with beside.open("rb") as plain:
                _replace(path.with_name("trace.json.gz"), lambda file: _compress(plain, file))
            beside.unlink()

    def wandb_id(self) -> str:
        """The id of this run at wandb: made up once, and the same whenever the run is resumed."""
        path = self.path / "wandb_id.txt"
        if not path.exists():
            with _reporting(path):
                _write(path, secrets.token_hex(4) + "\n")
        return path.read_text().strip() if rank() == 0 else ""

    def write_summary(self, summary: dict[str, Any]) -> None:
        _write(self.path / "summary.json", json.dumps(_finite(summary), indent=2) + "\n")


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a run folder, or None where there is none (the run never ended)."""
    file = folder / "summary.json"
    return json.loads(file.read_text()) if file.exists() else None


def _differences(before: Any, now: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            yield from _differences(before.get(key), now.get(key), f"{prefix}{key}.")
    elif before != now:
        yield prefix.rstrip(".")


@contextmanager
def _reporting(path: Path) -> Iterator[None]:
    """A full disk and the like in one line."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause: BaseException = error
        while not isinstance(cause, OSError) and cause.__context__ is not None:
            cause = cause.__context__  # torch hides it behind an error of its own
        reason = getattr(cause, "strerror", None) or str(cause).splitlines()[0]
        raise RunError(f"{path} could not be written ({reason}); what was there before is as it was") from error


def _replace(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file beside its place and move it there once it is on the disk: never half a file under its name."""
    if rank() > 0:
        return
    beside = path.with_name(path.name + ".part")
    try:
        with beside.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except (OSError, RuntimeError):
        beside.unlink(missing_ok=True)  # its room is needed
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the move, too
    finally:
        os.close(folder)


def _write(path: Path, text: str) -> None:
    _replace(path, lambda file: file.write(text.encode(errors="backslashreplace")))


def _compress(plain: IO[bytes], file: IO[bytes]) -> None:
    with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=4) as packed:
        shutil.copyfileobj(plain, packed)


def _plain(cfg: Any) -> dict[str, Any]:
    plain = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _cell(value: Any) -> Any:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value


def _finite(value: Any) -> Any:
    """JSON has no NaN: a figure that does not exist is null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
