"""A vLLM server in a process of its own, on this machine."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from grpo_lightning.errors import RunError
from grpo_lightning.rollout.server_client import ServerClient

TETHER = Path(__file__).with_name("tether.py")
STOPS_WITHIN = 15.0  # seconds that the tether needs at most


class ServerProcess:
    """Starts `vllm serve`, waits until it answers, and stops it with all that belongs to it.

    Args:
        arguments: of the server, without host and port.
        host: where it listens. port: 0 takes a free one.
        devices: CUDA_VISIBLE_DEVICES of the server; None leaves it.
        log: the file that its output is appended to.
        start_timeout: seconds until it must answer.
    """

    def __init__(
        self, arguments: list[str], *, host: str, port: int, devices: str | None, log: Path, start_timeout: float
    ) -> None:
        self.arguments, self.host, self.port = arguments, host, port
        self.devices, self.log, self.start_timeout = devices, log, start_timeout
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._given_up = threading.Event()
        self._log_start = 0

    def start(self) -> None:
        """Start the server and wait for its first answer.

        Raises:
            RunError: it ended or did not answer in time; the message has what it said last.
        """
        port = free_port(self.host, self.port)
        self.url = f"http://{'127.0.0.1' if self.host == '0.0.0.0' else self.host}:{port}"
        defaults = {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer has the same cores
        }
        environment = defaults | os.environ | {"VLLM_SERVER_DEV_MODE": "1"}  # the routes that take new weights
        if self.devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.devices
        # The module behind `vllm serve`, which itself does not start where vLLM was installed as vllm-cpu.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *self.arguments]
        command += ["--host", self.host, "--port", str(port)]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, str(TETHER), *command],
                stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + self.start_timeout
        while not self.answers():
            if (code := self._process.poll()) is not None:
                self._process = None
                raise RunError(f"the vLLM server ended with code {code}: {self._last_words()} (its output: {self.log})")
            if time.monotonic() > deadline:
                self.stop()
                raise RunError(
                    f"no answer from the vLLM server within rollout.engine.start_timeout={self.start_timeout:g} s "
                    f"(its output: {self.log})"
                )
            if self._given_up.wait(0.2):
                self.stop()
                raise RunError("the vLLM server was stopped before it had answered")

    def give_up(self) -> None:
        """End, with a RunError, a `start` that another thread is in, and all that come later."""
        self._given_up.set()

    def answers(self) -> bool:
        """Whether the server says that it is well."""
        return ServerClient(self.url).healthy()

    def stop(self) -> None:
        """Stop the server; it takes as long as the server needs, at most about ten seconds."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()  # which the tether waits for
            try:
                self._process.wait(timeout=STOPS_WITHIN)
            except subprocess.TimeoutExpired:  # a process forked from this one still holds that end open
                self._process.terminate()
                self._process.wait()
            self._process = None

    def _last_words(self) -> str:
        """The last line of this server's log that names an error."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)  # earlier servers have written there too
            lines = log.read().decode(errors="replace").splitlines()
        # vLLM's engine core says what is wrong; then the processes above it point at that.
        names_error = re.compile(r"(?:\w*Error|\w*Exception|error): (?!.*See root cause above)")
        errors = [(match, number) for number, line in enumerate(lines) if (match := names_error.search(line))]
        if not errors:
            return "no message"
        match, number = errors[-1]
        words = match.string[match.start() :]
        if re.search(r"\d validation errors? for ", words):  # pydantic's reason is in the next line
            words = " ".join([words, *map(str.strip, lines[number + 1 : number + 2])])
        return words[:400]


def free_port(host: str, port: int = 0) -> int:
    """A port of `host` that nothing listens on now: `port`, or any where that is 0.

    Raises:
        RunError: `port` is taken; whatever answers there would be asked instead of the server.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that has just been closed is free
        try:
            probe.bind((host, port))
        except OSError as error:
            where = "rollout.engine.host and rollout.engine.port"
            raise RunError(f"nothing can listen at {host}:{port} ({where}): {error}") from error
        return int(probe.getsockname()[1])
