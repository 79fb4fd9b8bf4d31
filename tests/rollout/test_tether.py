"""The process between this program and the server: the server ends when this program does, however that is."""

import subprocess
import sys
import time

import pytest

from grpo_lightning.rollout.server_process import TETHER
from tests.rollout.processes import alive, within

# The command of most tests: it starts a child, prints both numbers, and waits.
SLEEP = "import time; time.sleep(60)"
COMMAND = (
    f"import os, subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); "
    "print(os.getpid(), child.pid, flush=True); time.sleep(60)"
)
SHORT_PATIENCE = (
    f"import os, sys; sys.path.insert(0, {str(TETHER.parent)!r}); import tether; tether.PATIENCE = 0.4; "
    "os._exit(tether.main())"
)


def tether(code: str, patience: bool = True) -> subprocess.Popen[str]:
    start = [str(TETHER)] if patience else ["-c", SHORT_PATIENCE]
    return subprocess.Popen(
        [sys.executable, *start, sys.executable, "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def pids(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(number) for number in process.stdout.readline().split()]


def test_a_starter_killed_outright_takes_the_command_and_its_children_along():
    starter = (
        "import subprocess, sys, time; "
        f"tether = subprocess.Popen([sys.executable, {str(TETHER)!r}, sys.executable, '-c', {COMMAND!r}], "
        "stdin=subprocess.PIPE, start_new_session=True); print(tether.pid, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True)
    everyone = [*pids(process), *pids(process)]
    assert len(everyone) == 3 and all(map(alive, everyone))
    process.kill()
    process.wait()
    assert within(5, lambda: not any(map(alive, everyone)))


@pytest.mark.parametrize(
    ("code", "status"),
    [("pass", 0), ("import sys; sys.exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 128 + 9)],
)
def test_the_exit_code_is_passed_on(code, status):
    assert tether(code).wait(10) == status


@pytest.mark.parametrize("how", ["the end of the input", "SIGTERM"])
def test_the_command_gets_the_time_to_tidy_up(tmp_path, how):
    process = tether(
        "import signal, sys, time; from pathlib import Path\n"
        f"def end(*_): time.sleep(0.2); Path({str(tmp_path / 'tidy')!r}).touch(); sys.exit(5)\n"
        "signal.signal(signal.SIGTERM, end); print(1, flush=True); time.sleep(60)"
    )
    pids(process)
    if how == "SIGTERM":
        process.terminate()
    else:
        assert process.stdin is not None
        process.stdin.close()
    assert process.wait(10) == 5 and (tmp_path / "tidy").exists()


def test_who_does_not_end_on_request_is_killed():
    process = tether("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + COMMAND, patience=False)
    both = pids(process)
    started = time.monotonic()
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(10) == 128 + 9 and 0.3 < time.monotonic() - started < 4
    assert within(2, lambda: not any(map(alive, both)))


def test_what_the_command_leaves_behind_is_ended_also_when_it_is_stubborn():
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(0, flush=True); " + SLEEP
    code = (
        f"import os, subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {stubborn!r}], stdout=-1); "
        "child.stdout.readline(); print(child.pid, flush=True); os._exit(0)"
    )
    process = tether(code, patience=False)
    (child,) = pids(process)
    assert process.wait(10) == 0 and within(2, lambda: not alive(child))


def test_it_ends_though_nobody_waits_for_the_orphans():
    # As in a container whose first process does not: this one takes the orphans and leaves them as they are.
    code = f"import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); os._exit(0)"
    keeper = (
        "import ctypes, subprocess, sys; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER\n"
        f"tether = subprocess.Popen([sys.executable, '-c', {SHORT_PATIENCE!r}, sys.executable, '-c', {code!r}], "
        "stdin=subprocess.PIPE, start_new_session=True)\n"
        "sys.exit(tether.wait(10))"
    )
    assert subprocess.run([sys.executable, "-c", keeper], timeout=20).returncode == 0
