"""`python tether.py COMMAND...` runs a command that ends with the process that started this one, however that ends.

It holds the other end of this process's standard input: when that closes, even by a kill, the command is stopped, with
the processes that it started. No import of the package: it has to start at once.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType

PATIENCE = 10.0  # seconds between the request to end and the kill


def main() -> int:
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)

    def stop(number: int = 0, frame: FrameType | None = None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGTERM)
        timer = threading.Timer(PATIENCE, kill)
        timer.daemon = True
        timer.start()

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGKILL)

    def wait_for_the_end_of_input() -> None:
        sys.stdin.buffer.read()
        stop()

    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=wait_for_the_end_of_input, daemon=True).start()
    code = command.wait()
    # Whatever it left behind gets the time to tidy up. Where nobody waits for orphans, they stay when they have ended.
    stop()
    deadline = time.monotonic() + PATIENCE + 1
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(command.pid, 0)
            time.sleep(0.05)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # the reader of standard input may still wait
