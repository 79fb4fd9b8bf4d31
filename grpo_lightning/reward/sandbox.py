"""Starts and ends the isolated processes of `reward=code`, and says how isolated they are."""

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lightning.errors import RunError, UsageError

FEATURES = ("user", "network", "processes", "mounts", "ipc", "calls")
NEEDED = ("user", "network", "processes", "mounts")
_WORDS = {
    "user": "a user of its own",
    "network": "its own network namespace",
    "processes": "its own process namespace",
    "mounts": "its own file system",
    "ipc": "its own IPC namespace",
    "calls": "a filter of system calls",
}
_PATIENCE = 30.0  # seconds for what takes milliseconds on a machine that is not overloaded


class SandboxError(RunError):
    """The sandbox itself has failed: what was to be run has not been, or has been ended by someone else."""


@dataclass(frozen=True)
class Limits:
    """Of one process: seconds of CPU, bytes of memory; of all together: processes, bytes of files."""

    seconds: int
    memory: int
    processes: int
    files: int


class Sandbox:
    """The server in sandbox_child.py, which is started again where it has died.

    isolation: "required" wants all of NEEDED, "best" goes on with what the machine permits.
    Raises UsageError where that is not to be had; root that cannot become another user is refused always.
    """

    def __init__(self, isolation: str, limits: Limits):
        if not sys.platform.startswith("linux"):
            raise UsageError(f"reward=code isolates answers by what Linux has; this is {sys.platform}")
        self.limits = limits
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self.features: tuple[str, ...] = ()
        missing = self._find_features()
        lacking = [feature for feature in NEEDED if feature in missing]
        reasons = "; ".join(f"{_WORDS[feature]}: {missing[feature]}" for feature in lacking)
        if lacking and (isolation == "required" or (os.getuid() == 0 and "user" in missing)):
            self.close()
            if os.getuid() == 0 and "user" in missing:
                raise UsageError(
                    f"reward=code does not run answers as root, and this root cannot become another user "
                    f"({missing['user']}); start the run as an ordinary user"
                )
            raise UsageError(
                f"reward=code cannot isolate answers here ({reasons}); use a machine or container that allows it, or "
                "reward.code.isolation=best, which lets what a model writes run with what there is"
            )
        words = [_WORDS[feature] for feature in FEATURES if feature not in missing]
        self.description = ", ".join([*words, "limits"])
        if missing:
            reasons = "; ".join(f"{_WORDS[feature]} ({reason})" for feature, reason in missing.items())
            self.description += f"; NOT by: {reasons}"

    def start(self, kind: str, job: dict[str, Any], *descriptors: int) -> "Child":
        """Run a job of sandbox_child.py with these descriptors. Raises SandboxError if the server cannot be reached."""
        return self._start(kind, job, self.features, descriptors)

    def close(self) -> None:
        """End the server and all that it has started. A later job starts a new one."""
        with self._lock:
            self._end()

    def _find_features(self) -> dict[str, str]:
        """Sets `features`. Gives what is missing, with the reason."""
        if self._problem(FEATURES) is None:
            self.features = FEATURES
            return {}
        missing = {}
        for name in FEATURES:  # in this order: an ordinary user needs the first one for all others
            problem = self._problem((*self.features, name))
            if problem is None:
                self.features += (name,)
            else:
                missing[name] = problem
        return missing

    def _problem(self, features: tuple[str, ...]) -> str | None:
        """What goes wrong when nothing is run with these features."""
        child = self._start("nothing", {}, features, ())
        try:
            child.wait(_PATIENCE)
        except SandboxError as error:
            return str(error)
        finally:
            child.kill()
        return None

    def _start(self, kind: str, job: Any, features: tuple[str, ...], descriptors: tuple[int, ...]) -> "Child":
        order = {"kind": kind, "features": features, **vars(self.limits)}
        ours, theirs = socket.socketpair()
        paper = os.memfd_create("job")
        try:
            with open(paper, "wb", closefd=False) as file:
                file.write(json.dumps(job).encode())
            os.lseek(paper, 0, os.SEEK_SET)
            given = [theirs.fileno(), paper, *descriptors]
            with self._lock:
                for again in (True, False):
                    try:
                        socket.send_fds(self._connection(), [json.dumps(order).encode()], given)
                        break
                    except OSError as error:  # the server has died
                        self._end()
                        if not again:
                            raise SandboxError(f"the sandbox does not start: {error}") from error
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(paper)
            theirs.close()
        return Child(ours)

    def _connection(self) -> socket.socket:
        if self._socket is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._server = subprocess.Popen(
                    # -I -S: nothing from the environment, the current folder or site-packages
                    [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(Path(__file__).with_name("sandbox_child.py"))],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env={k: v for k, v in os.environ.items() if k == "LD_LIBRARY_PATH"},  # Python may need it to start
                    start_new_session=True,
                )
            self._socket = ours
        return self._socket

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None


class Child:
    """A running job. `kill` must be called, whatever happened."""

    def __init__(self, control: socket.socket):
        self._control = control
        self._report: dict[str, Any] | None = None

    def wait(self, seconds: float) -> int | None:
        """The exit code, None if it takes longer. Raises SandboxError if it was not run."""
        if self._report is None:
            if not _readable(self._control.fileno(), seconds):
                return None
            data = b""
            with contextlib.suppress(ConnectionError):
                data = self._control.recv(4096)
            self._report = json.loads(data) if data else {"problem": "the sandbox was ended from outside"}
        if "problem" in self._report:
            raise SandboxError(self._report["problem"])
        return int(self._report["exit"])

    def kill(self) -> None:
        """End it with all its processes, if it has not ended, and wait until they are gone."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        with contextlib.suppress(SandboxError):
            self.wait(_PATIENCE)
        self._control.close()


def read_until(descriptor: int, limit: int, deadline: float) -> bytes | None:
    """All that comes until the end of the file; None if that is more than `limit` bytes or after the deadline."""
    data = bytearray()
    while True:
        part = os.read(descriptor, 65536) if _readable(descriptor, deadline - time.monotonic()) else None
        if part == b"":
            return bytes(data)
        if part is None or len(data) + len(part) > limit:
            return None
        data += part


def _readable(descriptor: int, seconds: float) -> bool:
    waiting = select.poll()  # select takes no descriptors above 1023, which a trainer may have
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(max(0.0, seconds) * 1000))
