"""What scripts/bench_vs_trl.py and scripts/bench_scaling.py share.

A benchmarked run is a child process of its own, which tells a pipe when it is about to take a step and what the step
took, and takes the next one when it is told to. So two runs can take their steps in turns, A B A B, on an otherwise
idle machine, and the peak memory is that of one run.
"""

import json
import os
import platform
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
# Of 32 completions, row by row: 8 to 48 tokens, 29 on average.
LENGTHS = (
    8, 29, 43, 11, 14, 44, 14, 42, 41, 17, 16, 14, 42, 48, 48, 12,
    47, 40, 18, 8, 36, 37, 45, 36, 19, 36, 24, 23, 43, 20, 21, 32,
)  # fmt: skip
WARM_UP_TOKENS = 8  # of each completion, where the first step, which is not counted, is a short one


class Turns:
    """The child's end of the pipe.

    Args:
        pipe: its file descriptor.
    """

    def __init__(self, pipe: int) -> None:
        os.set_inheritable(pipe, False)
        self._pipe = Connection(pipe)
        self._started = self._started_cpu = 0.0

    def begin(self) -> None:
        """Say that everything is loaded, and wait for the first turn."""
        self._pipe.send({"ready": True})
        self._wait()

    def end_step(self, **report: Any) -> None:
        """Report the step that ends here, and wait for the next turn."""
        seconds, cpu = time.perf_counter() - self._started, time.process_time() - self._started_cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        self._pipe.send({"seconds": seconds, "cpu_s": cpu, "peak_rss_gb": peak, **report})
        self._wait()

    def _wait(self) -> None:
        try:
            self._pipe.recv()
        except EOFError:
            os._exit(1)  # whoever asked is gone
        self._started, self._started_cpu = time.perf_counter(), time.process_time()


class Child:
    """A run in a process of its own, which takes a step when it is asked to.

    Args:
        name: for messages. command: to it the number of the pipe is appended.
        threads: of torch and of whatever else it computes with.
    """

    def __init__(self, name: str, command: list[str], threads: int) -> None:
        self.name = name
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `close` is reached
        self._log = tempfile.NamedTemporaryFile("w+", prefix="bench_", suffix=".log")  # noqa: SIM115
        self._pipe, theirs = Pipe()
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            **{f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "MKL", "OPENBLAS")},
            "OMP_WAIT_POLICY": "PASSIVE",  # a run that waits for its turn leaves the cores to the other
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONWARNINGS": "ignore",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._process = subprocess.Popen(
            [*command[:-1], command[-1] + str(theirs.fileno())], cwd=ROOT, env=environment,
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        theirs.close()

    def answer(self) -> dict[str, Any]:
        """What the run says next."""
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.wait()
            self._log.seek(0)
            raise SystemExit(f"{self._log.read()[-4000:]}\n{self.name} failed; what it said stands above") from None

    def step(self) -> dict[str, Any]:
        """Let it take one step; returns what the step took."""
        self._pipe.send("go")
        return self.answer()

    def close(self) -> None:
        """End it: what a run does after its last step is no part of any step."""
        self._process.kill()
        self._process.wait()
        self._log.close()


class Results:
    """What was measured, written to a JSON file as it comes.

    Args:
        path: of the file, or None. settings: what the numbers depend on.
        resume: take over what the file holds, if it was measured with the same settings.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any], resume: bool = False) -> None:
        self.path = path
        self.data: dict[str, Any] = {"settings": settings, "machine": machine(), "versions": versions()}
        if path is not None and not path.parent.is_dir():
            raise SystemExit(f"--json {path}: there is no folder {path.parent}")
        if resume and path is None:
            raise SystemExit("--resume goes on in the file of --json: give --json PATH")
        if resume and path is not None and path.exists():
            earlier = json.loads(path.read_text())
            if earlier["settings"] != json.loads(json.dumps(settings)):
                raise SystemExit(f"--resume: {path} was measured with other settings: {earlier['settings']}")
            self.data = earlier

    def save(self) -> None:
        """Write the file, never half."""
        if self.path is not None:
            unfinished = self.path.with_name(f"{self.path.name}.unfinished")
            unfinished.write_text(json.dumps(self.data, indent=1) + "\n")
            unfinished.replace(self.path)


def summarise(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """One run's steps in short: medians over all steps but the first, which warms up, and the peak memory of the run.

    Args:
        reports: of the steps in order: `seconds`, `cpu_s` (of all threads, which other programs disturb less),
            `peak_rss_gb`, `phases` {name: seconds}, `lengths` and `prompts` (tokens of each completion and of the
            prompt before it).
    """
    counted = reports[1:]
    phases = {name: statistics.median(r["phases"].get(name, 0.0) for r in counted) for name in counted[-1]["phases"]}
    lengths = counted[-1]["lengths"]
    return {
        "step_s": statistics.median(r["seconds"] for r in counted),
        "steps_s": [r["seconds"] for r in counted],
        "cpu_s": statistics.median(r["cpu_s"] for r in counted),
        "warm_up_s": reports[0]["seconds"],
        "phases": phases,
        "peak_rss_gb": max(r["peak_rss_gb"] for r in reports),
        "completion_tokens": sum(lengths),
        "mean_length": sum(lengths) / len(lengths),
        "prompt_tokens": sum(counted[-1]["prompts"]) / len(lengths),
    }


def check_lengths(name: str, report: dict[str, Any], imposed: Iterable[int], prompt_tokens: int) -> None:
    """Raises SystemExit where a step has other completion or prompt lengths than those that were imposed."""
    if sorted(report["lengths"]) != sorted(imposed):
        raise SystemExit(f"{name} has completions of {sorted(report['lengths'])} tokens, not of {sorted(imposed)}")
    if set(report["prompts"]) != {prompt_tokens}:
        raise SystemExit(f"{name} has prompts of {sorted(set(report['prompts']))} tokens, not of {prompt_tokens}")


def write_prompts(folder: Path, path: str, count: int, tokens: int) -> None:
    """Write `count` training prompts and one held-out prompt, each of `tokens` tokens for the model in folder `path`.

    They are digits, which the tokenizers here read one by one, in the chat template if the model has one.
    """
    from grpo_lightning.data.prompts import Item, tokenize
    from grpo_lightning.model import load_tokenizer

    tokenizer = load_tokenizer(path)
    tokenizer.model_max_length = 10**9  # of the tokenizer, which only warns; the model's room is checked by the run

    def lengths(texts: list[str]) -> list[int]:
        return [len(prompt.token_ids) for prompt in tokenize([Item(text, None) for text in texts], tokenizer)[0]]

    digits = tokens - lengths(["1"])[0] + 1
    if digits < 1 or 10**digits < 10 * count:
        raise SystemExit(f"prompts of {tokens} tokens: with its chat template this model needs {tokens - digits + 4}")
    rng = random.Random(0)
    texts: set[str] = set()
    while len(texts) <= count:
        texts.add("".join(rng.choices("123456789"[:5], k=digits)))
    if set(lengths(sorted(texts))) != {tokens}:
        raise SystemExit(f"the tokenizer of {path} does not read digits one by one: there are no prompts of one length")
    rows = [json.dumps({"prompt": text, "answer": "0"}) for text in sorted(texts)]
    (folder / "train.jsonl").write_text("\n".join(rows[:-1]) + "\n")
    (folder / "val.jsonl").write_text(rows[-1] + "\n")


def model_path(model: str) -> str:
    """The folder of an option of conf/model. Raises SystemExit with one line where it is not there."""
    from grpo_lightning.errors import UsageError
    from grpo_lightning.model import resolve_path
    from grpo_lightning.objective.load import compose, conf_dir

    known = sorted(file.stem for file in (conf_dir() / "model").glob("*.yaml"))
    if model not in known:
        raise SystemExit(f"--model {model}: no such option of conf/model (there are: {', '.join(known)})")
    try:
        path = resolve_path(compose("train", [f"model={model}"]).model.path)
    except UsageError as error:
        raise SystemExit(str(error)) from error
    if not Path(path).is_absolute():
        path = str(ROOT / path)
    if not (Path(path) / "config.json").exists():
        raise SystemExit(f"{Path(path).name} is not there: run `make setup-bench`")
    return path


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """The processor, how many of it this process may use, and the memory, as far as the system says."""
    cpuinfo, meminfo = Path("/proc/cpuinfo"), Path("/proc/meminfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = int(meminfo.read_text().split()[1]) / 2**20 if meminfo.exists() else None
    return {"cpu": names[0] if names else platform.machine(), "cores": cores(), "memory_gb": memory}


def versions() -> dict[str, str]:
    """Of the packages that the numbers depend on, as far as they are installed."""
    found = {}
    for name in ("torch", "transformers", "lightning", "trl"):
        try:
            found[name] = version(name)
        except ImportError:
            continue
    return found


def say(message: str) -> None:
    """Progress, beside the results on the standard output."""
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


def show(table: Table) -> None:
    """Print a table, as wide as it is where the output goes to a file."""
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(table)


def command(main: Callable[[], None]) -> None:
    """Run a benchmark from the command line; Ctrl-C ends it in one line."""
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted: what was measured is in the file of --json, and --resume goes on", file=sys.stderr)
        sys.exit(130)
