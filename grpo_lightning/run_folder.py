"""What a run leaves behind: config.yaml, metrics.csv, rollouts/, validation/, checkpoints/, summary.json."""

import csv
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grpo_lightning.errors import UsageError

# What a resumed run may change: how long, how fast and how it is shown, and the optimiser's numbers.
MAY_CHANGE = (
    "trainer.", "optimizer.", "checkpoint.", "eval.every", "update.micro_batch_tokens", "rollout.engine.", "logger",
    "callbacks", "resume", "sweep", "model.lr",
)  # fmt: skip


class RunFolder:
    """The folder of one run. Files that are replaced are written beside their place and moved, never half written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rollouts, self.validation, self.checkpoints = (path / n for n in ("rollouts", "validation", "checkpoints"))
        self.begun = False
        self._header: list[str] | None = None

    def open(self, cfg: DictConfig, resume: bool) -> Path | None:
        """Prepare the folder; returns the newest checkpoint to go on from, or None to start from the beginning.

        Nothing that is there is changed before `begin`.

        Raises:
            UsageError: the folder holds a run and `resume` is off, or it cannot be written.
        """
        checkpoints = self.all_checkpoints()
        if not resume and self.holds_run():
            raise UsageError(
                f"hydra.run.dir={self.path} already holds a run: resume=auto goes on with it, "
                "another hydra.run.dir starts a new one"
            )
        if resume and checkpoints:
            self._check_same(cfg)
        try:
            for folder in (self.rollouts, self.validation, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            if not checkpoints:
                _write(self.path / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
        except OSError as error:
            raise UsageError(f"hydra.run.dir={self.path} cannot be written: {error}") from error
        return checkpoints[-1] if resume and checkpoints else None

    def holds_run(self) -> bool:
        """Whether something was computed here."""
        return (self.path / "metrics.csv").exists() or any(self.validation.glob("*.jsonl"))

    def _check_same(self, cfg: DictConfig) -> None:
        """Refuse to go on with another objective, model or data than those the checkpoint was made with."""
        before = OmegaConf.to_container(OmegaConf.load(self.path / "config.yaml"))
        now = OmegaConf.to_container(cfg, resolve=True)
        assert isinstance(before, dict) and isinstance(now, dict)
        for key in _differences(before, now):
            if not key.startswith(MAY_CHANGE):
                raise UsageError(
                    f"{key} differs from the run in {self.path}, which can only go on as it was: leave it out, "
                    "or start a new run in another hydra.run.dir"
                )

    @staticmethod
    def rollout_of(checkpoint: Path) -> int:
        """The rollout that a checkpoint was written after."""
        return int(checkpoint.stem.partition("=")[2])

    def all_checkpoints(self) -> list[Path]:
        """From the oldest to the newest: they are named by rollout."""
        return sorted(self.checkpoints.glob("rollout=*.ckpt"))

    def begin(self, cfg: DictConfig, overrides: list[str], step: int, rollout: int) -> None:
        """Training begins, at `step` and after `rollout` (0 and 0, or those of a checkpoint that has been loaded).

        What a stopped run wrote beyond that is removed: it will be written again.
        """
        self.begun = True
        _write(self.path / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
        _write(self.path / "overrides.yaml", OmegaConf.to_yaml(OmegaConf.create(overrides)))
        table = self.path / "metrics.csv"
        if table.exists():
            with table.open(newline="") as file:
                rows = list(csv.reader(file))
            at = rows[0].index("step")
            kept = [rows[0], *(row for row in rows[1:] if len(row) == len(rows[0]) and int(row[at]) <= step)]
            _write(table, "".join(",".join(row) + "\n" for row in kept))
            self._header = rows[0]
        for folder in (self.rollouts, self.validation):
            for written in folder.glob("*.jsonl"):
                if int(written.stem) > rollout:
                    written.unlink()

    def write_metrics(self, row: dict[str, Any], known: list[str]) -> None:
        """Append one row and flush it. The first row fixes the header: `known` and whatever else that row has."""
        table = self.path / "metrics.csv"
        if self._header is None:
            self._header = list(dict.fromkeys([*known, *row]))
            _write(table, ",".join(self._header) + "\n")
        unknown = [name for name in row if name not in self._header]
        if unknown:
            raise RuntimeError(f"metrics.csv has a fixed header and no column for {', '.join(unknown)}")
        with table.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow([_cell(row.get(name)) for name in self._header])
            file.flush()
            os.fsync(file.fileno())

    def write_rows(self, folder: Path, number: int, records: list[dict[str, Any]]) -> None:
        """One JSON object a line in `folder`/NNNNNN.jsonl."""
        _write(folder / f"{number:06d}.jsonl", "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))

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


def _write(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".part")
    beside.write_text(text, encoding="utf-8", errors="backslashreplace")
    beside.replace(path)


def _cell(value: Any) -> Any:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value


def _finite(value: Any) -> Any:
    """JSON has no NaN: a figure that does not exist is null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
