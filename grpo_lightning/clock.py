"""Seconds spent in each phase of a run (generate, score, logps, update, sync, validate, checkpoint)."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

PHASES = ("generate", "score", "logps", "update", "sync", "validate")  # of a rollout: metrics.csv has their seconds
OF_RUN = (*PHASES, "checkpoint")


class PhaseClock:
    """Adds up wall-clock seconds by phase, over the run (`total`) and since the last `lap` (one rollout).

    Of a phase within another one the seconds are those of the inner one alone. `parts` are seconds within phases, such
    as forward and backward within update, in this process.

    `phase` names what is going on now, for the progress bar; `on_change` is called whenever it changes. Each phase and
    part is entered through `span(name)`, by which profile=true marks it in the trace.
    """

    def __init__(self) -> None:
        self.total: dict[str, float] = defaultdict(float)
        self.parts: dict[str, float] = defaultdict(float)
        self.phase = "start"
        self.on_change = lambda phase: None
        self.span: Callable[[str], AbstractContextManager[object]] = nullcontext
        self._lap: dict[str, float] = defaultdict(float)
        self._inner = 0.0  # seconds of the phases within the one that is going on

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        outer, self._inner = self._inner, 0.0
        self.on_change(phase)
        started = time.perf_counter()
        try:
            with self.span(phase):
                yield
        finally:
            seconds = time.perf_counter() - started
            self.total[phase] += seconds - self._inner
            self._lap[phase] += seconds - self._inner
            self.phase, self._inner = before, outer + seconds

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the phase that is going on: it adds to `parts[name]` and to nothing else."""
        started = time.perf_counter()
        try:
            with self.span(name):
                yield
        finally:
            self.parts[name] += time.perf_counter() - started

    def seconds(self, total: float) -> dict[str, float]:
        """`total`, what each phase had of it, and `other`, what none of them had."""
        named = {phase: self.total[phase] for phase in OF_RUN}
        if self.total["trace"]:
            named["trace"] = self.total["trace"]
        return {"total": total, **named, "other": total - sum(named.values())}

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        lap, self._lap = dict(self._lap), defaultdict(float)
        return lap
