"""train.py whose vLLM engine core is killed outright in the third rollout, when its first group has been answered."""

import os
import signal
from pathlib import Path
from typing import Any

from grpo_lightning.rollout.engine import Completion, Request
from grpo_lightning.rollout.vllm_server import VLLMServerEngine
from grpo_lightning.train import main

PROMPTS = 16  # of a rollout; a validation has fewer
generate, group = VLLMServerEngine._generate, VLLMServerEngine._group
rollouts = 0


def descendants(pid: int) -> list[int]:
    """The processes below `pid`."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    below = list(children.get(pid, []))
    for child in below:
        below += children.get(child, [])
    return below


def engine_core() -> int:
    """The engine core of the server that this process has started."""
    (pid,) = [pid for pid in descendants(os.getpid()) if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text()]
    return pid


def counted(self: VLLMServerEngine, requests: list[Request], *others: Any) -> Any:
    global rollouts
    rollouts += len(requests) == PROMPTS
    return generate(self, requests, *others)


def killed(self: VLLMServerEngine, answer: Any, n: int) -> list[Completion]:
    global rollouts
    if rollouts == 3:
        rollouts += 100
        os.kill(engine_core(), signal.SIGKILL)
    return group(self, answer, n)


if __name__ == "__main__":
    VLLMServerEngine._generate = counted  # type: ignore[method-assign]
    VLLMServerEngine._group = killed  # type: ignore[method-assign]
    main()
