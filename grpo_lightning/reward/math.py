"""`reward=math`: mathematical equality by math-verify, in worker processes with a time-out that works."""

import contextlib
import importlib.util
import json
import logging
import os
import queue
import re
import select
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from grpo_lightning.errors import RunError, UsageError
from grpo_lightning.reward.answer import Number, marked_answers, visible, whole_number
from grpo_lightning.reward.exact import final_number, gold_text, same_number
from grpo_lightning.reward.score import RewardBatch

logger = logging.getLogger(__name__)
_START_SECONDS = 120.0
_COMMAND = re.compile(r"\\(?:begin|end)\s*\{\w+\}|\\[A-Za-z]+")
_PROSE = re.compile(r"(?!and\b)[A-Za-z]{3,}")  # two letters may be a product
_NAME = re.compile(r"(?<![\\A-Za-z])(sin|cos|tan|log|ln|pi)(?![A-Za-z])")  # written without its backslash


class Math:
    r"""1 if the final answer equals the reference mathematically, else 0; no score if the reference is no mathematics.

    The last of `\boxed{}`, `<answer>`, `####` and "the answer is" counts, without one what math-verify finds in the
    text after `</think>`. Numbers are compared as `reward=exact` does first (percent and units included).
    An answer without a verdict after `timeout` seconds is wrong; a reference that cannot be parsed in that time gives
    no score.

    timeout: seconds for one answer, above 0. workers: processes. They start at the first call and end with `close`.
    """

    by_row = True

    def __init__(self, timeout: float = 5.0, workers: int = 1, weight: float = 1.0, correctness: bool = True):
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
            raise UsageError(f"reward.math.timeout must be a number of seconds above 0, got {timeout!r}")
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise UsageError(f"reward.math.workers must be a whole number from 1, got {workers!r}")
        if importlib.util.find_spec("math_verify") is None:
            raise UsageError("reward=math needs math-verify: pip install math-verify 'antlr4-python3-runtime==4.9.*'")
        self.timeout = timeout
        self.workers = workers
        self.weight = weight
        self.correctness = correctness
        self._idle: queue.Queue[_Worker | None] = queue.Queue()
        for _ in range(workers):
            self._idle.put(None)  # a place for a worker that has yet to be started

    def __call__(self, batch: RewardBatch) -> list[float | None]:
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(self._score, batch.prompts, batch.completions, batch.answers))

    def close(self) -> None:
        """End the workers. A later call starts new ones."""
        for _ in range(self.workers):
            worker = self._idle.get()
            if worker is not None:
                worker.kill()
            self._idle.put(None)

    def _score(self, prompt: str, completion: str, answer: object) -> float | None:
        gold = gold_text(answer)
        if gold is None:
            return None
        number = whole_number(gold)
        if number is None and _is_prose(gold):
            return None
        text = visible(prompt, completion)
        if text is None:
            return 0.0
        if number is not None and same_number(number, final_number(text, strict=False)):
            return 1.0
        return self._ask(_latex(_without_unit(gold, number)), _latex(_final_expression(text)))

    def _ask(self, gold: str, answer: str) -> float | None:
        worker = self._idle.get()
        try:
            if worker is None or not worker.alive:
                worker = _Worker(self.timeout)
            verdict, failed = worker.ask(gold, answer, self.timeout)
            if failed:
                logger.warning("reward.math: no verdict within %s s on %.80r against %.80r", self.timeout, answer, gold)
                worker.kill()
                worker = None
            return verdict
        except BaseException:
            if worker is not None:
                worker.kill()
                worker = None
            raise
        finally:
            self._idle.put(worker)


def _is_prose(text: str) -> bool:
    return _PROSE.search(_COMMAND.sub(" ", _latex(text))) is not None


def _latex(text: str) -> str:
    return _NAME.sub(r"\\\1", text)


def _final_expression(text: str) -> str:
    """The last marked answer or the last line that is no prose; else the whole text, which math-verify searches."""
    for mark in marked_answers(text):
        if mark.kind in ("boxed", "tag"):
            return mark.text
        if mark.text and not _is_prose(mark.text):
            return mark.text.rstrip(".")
    last_line = text.strip().rpartition("\n")[2]
    return text + "\n" if _is_prose(last_line) else last_line


def _without_unit(gold: str, number: Number | None) -> str:
    return gold if number is None or not re.search(r"[A-Za-z%]", gold) else str(number.value)


class _Worker:
    """A running math_worker.py. Only one thread at a time may use it."""

    def __init__(self, timeout: float):
        # -P: this folder, whose modules are named like the standard library's, must not be on the worker's path
        script = Path(__file__).with_name("math_worker.py")
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script), str(int(timeout) + 2)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the training process
        )
        self._read_ahead = b""
        if self._line(_START_SECONDS) != "ready":
            self.kill()
            raise RunError(f"reward.math: the worker process did not start; try: {sys.executable} -P {script} 5")

    def ask(self, gold: str, answer: str, timeout: float) -> tuple[float | None, bool]:
        """(score, whether the worker has to be replaced)."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"gold": gold, "answer": answer}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:  # it has just died
            return None, True
        gold_parses = self._line(timeout)
        if gold_parses != "true":
            return None, gold_parses is None
        equal = self._line(timeout)
        return float(equal == "true"), equal is None

    def _line(self, timeout: float) -> str | None:
        """The next line the worker says; None if it takes longer than `timeout` seconds or has died."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout
        while b"\n" not in self._read_ahead:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(descriptor, 4096) if ready else b""
            if not data:
                return None
            self._read_ahead += data
        line, self._read_ahead = self._read_ahead.split(b"\n", 1)
        return line.decode()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        # leaving the block closes the pipes and waits; what a dead worker has not read cannot be flushed
        with contextlib.suppress(BrokenPipeError), self._process:
            pass
