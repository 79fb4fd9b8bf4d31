"""Small tasks of both kinds for reward=code, and what asks about the machine after hostile answers."""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_lightning.errors import UsageError
from grpo_lightning.reward import RewardBatch, sandbox
from grpo_lightning.reward.code import Code
from grpo_lightning.reward.sandbox import FEATURES, Sandbox

SECRET = 271828  # what the task asks for, and what no answer can know


def function_rows(completions: list[str], **columns: str) -> RewardBatch:
    row = {
        "prompt": 'def f(x):\n    """The secret number."""\n',
        "entry_point": "f",
        "test": f"def check(candidate):\n    assert candidate(1) == {SECRET}\n",
        **columns,
    }
    return batch(completions, row)


def program_rows(completions: list[str], cases: Any = None) -> RewardBatch:
    return batch(completions, {"cases": cases or [{"input": "1\n", "output": f"{SECRET}\n"}]})


def batch(completions: list[str], row: dict[str, Any]) -> RewardBatch:
    n = len(completions)
    return RewardBatch([""] * n, completions, [None] * n, {name: [value] * n for name, value in row.items()})


def code(**options: Any) -> Code:
    """The component, or a skipped test where this machine does not allow what it needs."""
    try:
        return Code(**options)
    except UsageError as error:
        pytest.skip(str(error))


def best(features: tuple[str, ...], **options: Any) -> Code:
    """The component where the machine permits these features only."""

    class Poor(Sandbox):
        def _find_features(self) -> dict[str, str]:
            missing = {}
            for name in FEATURES:
                if name in features and self._problem((*self.features, name)) is None:
                    self.features += (name,)
                else:
                    missing[name] = "not in this test"
            if features != self.features:
                pytest.skip(f"the machine permits {self.features} of {features}")
            return missing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo_lightning.reward.code.Sandbox", Poor)
        return Code(isolation="best", **options)


def processes(component: Code) -> list[int]:
    """What lives below the sandbox's server, once supervisors have had the time to end."""
    server = component._sandbox._server
    deadline = time.monotonic() + 5
    while server is not None and (found := below(server.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [] if server is None else found


def below(parent: int) -> list[int]:
    """The living descendants of a process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found += [int(folder.name), *below(int(folder.name))]
    return found


def of_runners() -> list[int]:
    """Runners of this repository, whoever their parent is, when the tests run as root."""
    script = str(Path(sandbox.__file__).with_name("sandbox_child.py")).encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if 60600 <= os.stat(folder).st_uid < 61100 and script in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def folders() -> list[str]:
    return sorted(name for name in os.listdir(tempfile.gettempdir()) if name.startswith("answer-"))
