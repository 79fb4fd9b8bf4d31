"""Profile: where the time of a run went, and a trace of one rollout (profile=true)."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function

from grpo_lightning.clock import OF_RUN, PhaseClock
from grpo_lightning.distributed import rank
from grpo_lightning.errors import RunError
from grpo_lightning.run_folder import RunFolder

log = logging.getLogger(__name__)

PARTS = ("forward", "backward", "optimizer")  # of update
OPERATORS = 25
Line = tuple[str, float, float | None]  # what, its seconds, its tokens a second


class Profile(L.Callback):
    """Counts what this process does from the start of training on, and traces its second rollout, or its only one.

    It stands before the callbacks that take time. On a GPU each phase and part waits for what it has begun, so that its
    seconds are its own; that makes a profiled run a little slower than others.

    Args:
        tokens: phase -> tokens it has handled so far, for those whose tokens are counted.
    """

    def __init__(self, folder: RunFolder, clock: PhaseClock, tokens: Callable[[], dict[str, int]]) -> None:
        self.folder, self.clock, self.tokens = folder, clock, tokens
        self.traced: int | None = None  # the rollout, once its trace is written
        self._began: float | None = None
        self._before: dict[str, float] = {}
        self._tokens_before: dict[str, int] = {}
        self._chosen = 0
        self._trace: profile | None = None
        self._operators = ""
        clock.span = _span

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._began, self._before, self._tokens_before = time.perf_counter(), dict(self.clock.total), self.tokens()
        self._chosen = min(trainer.current_epoch + 2, trainer.max_epochs or 0)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch + 1 == self._chosen and rank() == 0:
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._trace = profile(activities=[ProfilerActivity.CPU, *gpu])
            self._trace.start()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._trace is not None:
            with self.clock("trace"):
                trace, self._trace = self._trace, None
                trace.stop()
                self.folder.write_trace(trace.export_chrome_trace)
                self._operators, self.traced = _operators(trace), self._chosen

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self._trace is not None:  # of a rollout that did not come to its end
            trace, self._trace = self._trace, None
            trace.stop()

    def report(self) -> dict[str, Any]:
        """Print the table, write profile.md, and return the figures for summary.json; nothing before training began."""
        if self._began is None:
            return {}
        tracing = self.clock.total["trace"] - self._before.get("trace", 0.0)  # nothing that other runs do
        total = time.perf_counter() - self._began - tracing
        lines = self._lines(total)
        table = Table(title="where the time went")
        for name in ("phase", "seconds", "share", "tokens/s"):
            table.add_column(name, justify="left" if name == "phase" else "right")
        for line in [*lines, ("total", total, None)]:
            table.add_row(*_cells(line, total))
        Console(highlight=False).print(table)
        try:
            self.folder.write_profile(self._text(lines, total))
        except RunError as error:  # the run itself is as good as it was
            log.error("%s", error)
        figures = {
            what.strip(): {"seconds": seconds, "share": seconds / total, "tokens_per_s": speed}
            for what, seconds, speed in lines
        }
        return {"seconds": total, "traced_rollout": self.traced, "phases": figures}

    def _lines(self, total: float) -> list[Line]:
        seconds = {phase: self.clock.total[phase] - self._before.get(phase, 0.0) for phase in OF_RUN}
        tokens = {phase: count - self._tokens_before[phase] for phase, count in self.tokens().items()}
        lines: list[Line] = []
        for phase in OF_RUN:
            lines.append((phase, seconds[phase], _speed(tokens.get(phase, 0), seconds[phase])))
            if phase == "update" and self.clock.parts:
                parts = {name: self.clock.parts[name] for name in PARTS}
                lines += [(f"  {name}", took, _speed(tokens["update"], took)) for name, took in parts.items()]
                lines.append(("  rest of update", seconds[phase] - sum(parts.values()), None))
        return [*lines, ("other", total - sum(seconds.values()), None)]

    def _text(self, lines: list[Line], total: float) -> str:
        rows = [_cells(line, total) for line in [*lines, ("total", total, None)]]
        text = [
            "# Where the time went\n",
            "Of this process, from the start of training, without the writing of the trace. Indented lines are parts "
            "of the phase above them; `other` is everything else in the loop.\n",
            _markdown(["phase", "seconds", "share", "tokens/s"], rows),
        ]
        if self._operators:
            text += [f"\n# Rollout {self.traced}\n", self._operators]
        return "\n".join(text)


@contextmanager
def _span(name: str) -> Iterator[None]:
    with record_function(name):
        _settle()
        yield
        _settle()


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _speed(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if tokens and seconds else None


def _cells(line: Line, total: float) -> list[str]:
    what, seconds, speed = line
    return [what, f"{seconds:.2f}", f"{seconds / total:.1%}", "" if speed is None else f"{speed:,.0f}"]


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *([r[0].replace("  ", "&emsp;"), *r[1:]] for r in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _operators(trace: profile) -> str:
    """The operators that took most of the traced rollout, by the time in themselves."""
    gpu = torch.cuda.is_available()
    events: list[Any] = list(trace.key_averages())

    def took(event: Any) -> float:
        return float(event.self_device_time_total if gpu else event.self_cpu_time_total) / 1e3

    total = sum(map(took, events))
    top = sorted(events, key=took, reverse=True)[:OPERATORS]
    where = "GPU" if gpu else "CPU"
    rows = [[event.key[:80], str(event.count), f"{took(event):.1f}", f"{took(event) / total:.1%}"] for event in top]
    return (
        "The trace is in `profile/` (chrome://tracing, https://ui.perfetto.dev). Tracing makes a rollout slower, small "
        "operators most. Phases stand among the operators with the time that is none's, which is Python's.\n\n"
        + _markdown(["operator", "calls", f"ms in itself ({where})", "share"], rows)
        + "\n"
    )
