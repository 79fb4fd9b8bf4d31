"""Seconds spent in each phase of a run (generate, score, update, sync, validate)."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseClock:
    """Adds up wall-clock seconds by phase, over the run (`total`) and since the last `lap` (one rollout).

    `phase` names what is going on now, for the progress bar; `on_change` is called whenever it changes.
    """

    def __init__(self) -> None:
        self.total: dict[str, float] = defaultdict(float)
        self.phase = "start"
        self.on_change = lambda phase: None
        self._lap: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        self.on_change(phase)
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self.total[phase] += seconds
            self._lap[phase] += seconds
            self.phase = before

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        lap, self._lap = dict(self._lap), defaultdict(float)
        return lap
