"""`reward=code`: runs the unit tests of a task on the program that a completion holds, isolated from this machine."""

import json
import logging
import math
import os
import re
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from grpo_lightning.errors import RunError, UsageError
from grpo_lightning.reward.answer import visible
from grpo_lightning.reward.sandbox import Limits, Sandbox, SandboxError, read_until
from grpo_lightning.reward.score import RewardBatch, Unscored

logger = logging.getLogger(__name__)
_BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
_MB = 2**20


class Code:
    """1 if the program passes all tests of its row, 0 if not, no score for a row without tests.

    The program is the last ```python block of the completion (after `</think>`), else its last block of any kind, else
    all of it. Two kinds of tests, by the columns a row has:

    - a function, as in HumanEval: `test` defines `check(candidate)` and `entry_point` names the function. The program
      defines it, or goes on behind the text in `prompt`. The tests run in a process of their own, which sends the
      arguments to the answer's process and takes plain values from it (numbers, text, bytes, None, lists, tuples,
      sets, dictionaries), so that an answer can neither see nor change what it is compared with.
    - a program, which reads its standard input: `cases` holds a list of {input, output}, or {inputs, outputs} with two
      lists, or either as JSON text. It is started once per case, must end without an error, and its output must be
      the same up to white space within lines and at both ends (`exact`: to the last character).

    test, entry_point, prompt, cases: names of columns.
    timeout: seconds for one answer with all its tests. workers: answers at a time; None: one per CPU.
    memory: MB for one process. processes: at most so many (threads count). output: MB of output, and of files.
    isolation: "required" refuses where this machine does not allow a user, a process namespace, a network namespace
        and a file system of its own; "best" goes on with what there is. docs/sandbox.md says what each is worth.
    """

    by_row = True

    def __init__(
        self,
        test: str = "test",
        entry_point: str = "entry_point",
        prompt: str = "prompt",
        cases: str = "cases",
        exact: bool = False,
        timeout: float = 10.0,
        workers: int | None = None,
        memory: int = 512,
        processes: int = 4,
        output: int = 16,
        isolation: str = "required",
        weight: float = 1.0,
        correctness: bool = True,
    ):
        for option, column in (("test", test), ("entry_point", entry_point), ("prompt", prompt), ("cases", cases)):
            if not isinstance(column, str) or not column:
                raise UsageError(f"reward.code.{option} must be the name of a column, got {column!r}")
        for option, flag in (("exact", exact), ("correctness", correctness)):
            if not isinstance(flag, bool):
                raise UsageError(f"reward.code.{option} must be true or false, got {flag!r}")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
            raise UsageError(f"reward.code.timeout must be a number of seconds above 0, got {timeout!r}")
        workers = len(os.sched_getaffinity(0)) if workers is None else workers
        for option, number, least in (
            ("workers", workers, 1), ("memory", memory, 64), ("processes", processes, 1), ("output", output, 1)
        ):  # fmt: skip
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise UsageError(f"reward.code.{option} must be a whole number from {least}, got {number!r}")
        if isolation not in ("required", "best"):
            raise UsageError(f"reward.code.isolation must be required or best, got {isolation!r}")
        self.test, self.entry_point, self.prompt, self.cases = test, entry_point, prompt, cases
        self.exact = exact
        self.timeout = timeout
        self.workers = workers
        self.weight = weight
        self.correctness = correctness
        self._output = output * _MB
        self._sandbox = Sandbox(isolation, Limits(math.ceil(timeout) + 1, memory * _MB, processes, output * _MB))

    def __call__(self, batch: RewardBatch) -> list[float | Exception | None]:
        """An exception in the place of a score is a row on which the sandbox (Unscored) or its tests have failed."""
        columns = batch.columns
        if not ({self.test, self.entry_point} <= set(columns) or self.cases in columns):
            raise UsageError(
                f"reward=code needs the columns {self.test!r} and {self.entry_point!r} (options test and entry_point) "
                f"or {self.cases!r} (option cases); there are: {', '.join(sorted(columns)) or 'none'}"
            )
        _tell(self._sandbox.description)
        rows = [{name: column[i] for name, column in columns.items()} for i in range(len(batch))]
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(self._score, batch.prompts, batch.completions, rows))

    def close(self) -> None:
        """End the sandbox. A later call starts it again."""
        self._sandbox.close()

    def _score(self, prompt: str, completion: str, row: dict[str, Any]) -> float | Exception | None:
        text = visible(prompt, completion)
        try:
            try:
                return self._run(text, row)
            except SandboxError as error:
                logger.debug("reward.code: %s; trying once more", error)
                return self._run(text, row)
        except (SandboxError, OSError) as error:
            return Unscored(f"{type(error).__name__}: {error}")
        except RunError as error:
            return error

    def _run(self, text: str | None, row: dict[str, Any]) -> float | None:
        if row.get(self.test) and row.get(self.entry_point):
            test, name, start = row[self.test], row[self.entry_point], row.get(self.prompt) or ""
            if not all(isinstance(value, str) for value in (test, name, start)):
                raise RunError("the tests, the name of the function and the prompt must be text")
            return 0.0 if text is None else self._function(text, test, name, start)
        cases = read_cases(row.get(self.cases))
        if cases is None:
            return None
        return 0.0 if text is None else self._program(program(text), cases)

    def _function(self, text: str, test: str, name: str, start: str) -> float:
        code = program(text, name)
        continues = not defines(code, name)
        deadline = time.monotonic() + self.timeout
        for_judge, for_answer = socket.socketpair()
        verdict, verdict_end = os.pipe()
        children = []
        try:
            task = {"prompt": start, "entry_point": name}
            job = {**task, "code": code, "continues": continues}
            children.append(self._sandbox.start("function", job, for_answer.fileno()))
            children.append(self._sandbox.start("judge", {**task, "test": test}, for_judge.fileno(), verdict_end))
            for_judge.close()
            for_answer.close()
            os.close(verdict_end)
            verdict_end = -1
            said = (read_until(verdict, 4096, deadline) or b"").decode()
        finally:
            for child in children:
                child.kill()
            for_judge.close()
            for_answer.close()
            os.close(verdict)
            if verdict_end != -1:
                os.close(verdict_end)
        for child in children:
            child.wait(0)  # raises if it has not been isolated and so not run
        if said.startswith("no test"):
            raise RunError(f"the tests of {name!r} cannot be run ({said})")
        return float(said == "passed")

    def _program(self, code: str, cases: list[tuple[str, str]]) -> float:
        deadline = time.monotonic() + self.timeout
        for given, expected in cases:
            written = self._output_of(code, given, deadline)
            if written is None or not same_output(written, expected, self.exact):
                return 0.0
        return 1.0

    def _output_of(self, code: str, given: str, deadline: float) -> str | None:
        """What the program writes; None if it fails, takes too long or writes too much."""
        paper = os.memfd_create("input")
        out, out_end = os.pipe()
        child = None
        try:
            with open(paper, "wb", closefd=False) as file:
                file.write(given.encode())
            os.lseek(paper, 0, os.SEEK_SET)
            child = self._sandbox.start("program", {"code": code}, paper, out_end)
            os.close(out_end)
            out_end = -1
            written = read_until(out, self._output, deadline)
            ended = child.wait(deadline - time.monotonic())
        finally:
            if child is not None:
                child.kill()
            for descriptor in (paper, out, out_end):
                if descriptor != -1:
                    os.close(descriptor)
        return written.decode(errors="replace") if written is not None and ended == 0 else None


@cache
def _tell(isolation: str) -> None:
    """Once in a run, where training and validation have a component each."""
    logger.info("reward.code: answers are isolated by: %s", isolation)


def program(text: str, name: str | None = None) -> str:
    """The code in a completion; of several blocks the last one that defines `name`, if any does."""
    blocks = [(match[1].lower(), match[2]) for match in _BLOCK.finditer(text)]
    chosen = [code for language, code in blocks if language in ("python", "python3", "py")]
    chosen = chosen or [code for _, code in blocks] or [text]
    return next((code for code in reversed(chosen) if name is not None and defines(code, name)), chosen[-1])


def defines(code: str, name: str) -> bool:
    return (
        re.search(rf"^(?:(?:async\s+)?def\s+{re.escape(name)}\b|{re.escape(name)}\s*=)", code, re.MULTILINE) is not None
    )


def read_cases(value: Any) -> list[tuple[str, str]] | None:
    """(input, output) of every case; None where the row has none. Raises RunError for what is no list of cases."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RunError(f"the test cases are no JSON: {error}") from None
    value = _as_list(value)
    if isinstance(value, Mapping):
        inputs, outputs = (_as_list(value.get(f"{name}s", value.get(name))) for name in ("input", "output"))
        if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple) or len(inputs) != len(outputs):
            raise RunError("the test cases must have as many inputs as outputs, in two lists")
        cases = list(zip(inputs, outputs, strict=True))
    elif isinstance(value, list | tuple):
        cases = [(case.get("input"), case.get("output")) if isinstance(case, Mapping) else case for case in value]
    elif value is None or value == "" or value != value:
        return None
    else:
        raise RunError(f"the test cases must be a list of {{input, output}}, got {type(value).__name__}")
    for case in cases:
        if not (isinstance(case, list | tuple) and len(case) == 2 and all(isinstance(text, str) for text in case)):
            raise RunError(f"a test case must have an input and an output, both text, got {str(case)[:60]}")
    return [(given, expected) for given, expected in cases] or None


def _as_list(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value  # a list in a Parquet file


def same_output(written: str, expected: str, exact: bool) -> bool:
    return written == expected if exact else _lines(written) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.strip().splitlines()]
