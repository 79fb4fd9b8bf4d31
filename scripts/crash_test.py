"""Kill a run with SIGKILL again and again, resume it each time, and compare it with a run that was left alone.

    python scripts/crash_test.py                          # 20 kills of a short run of the embedded model
    python scripts/crash_test.py --kills 6 algorithm=dapo update.minibatches=2
    python scripts/crash_test.py --devices 2              # the same with trainer=ddp on the CPU

Moments are random; a quarter of the kills each aims at a checkpoint being written, a rollout being generated and a
validation. A run that completes is compared, and the next kills are of another one. The exit code is 0 if nothing was
lost: the same metrics (times and speeds aside), rollout and validation files, and exported weights. Linux only.
"""

import argparse
import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).parent.parent
PATIENCE = 600.0  # seconds without the moment that is waited for
AIMS = ("checkpoint", "generate", "validate", "any")
Seconds = dict[int, dict[str, float]]  # by rollout and phase
console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rollouts", type=int, default=10)
    parser.add_argument("--every", type=int, default=2, help="rollouts between checkpoints, and between validations")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", type=Path, help="where the two runs go (default: a temporary folder)")
    parser.add_argument("overrides", nargs="*", help="further options of train.py")
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="crash_test_"))
    command = [
        sys.executable, str(ROOT / "train.py"), "logger=none", "trainer=cpu", "rollout.prompts=8", "eval.prompts=16",
        f"trainer.max_epochs={options.rollouts}", f"checkpoint.every={options.every}", f"eval.every={options.every}",
    ]  # fmt: skip
    if options.devices > 1:
        command += ["trainer=ddp", "trainer.accelerator=cpu", f"trainer.devices={options.devices}"]
    command += options.overrides
    whole, rng = out / "whole", random.Random(options.seed)
    began = time.monotonic()
    if subprocess.run([*command, f"hydra.run.dir={whole}"], stdout=subprocess.DEVNULL).returncode:
        console.print("[red]the undisturbed run failed[/]")
        return 1
    console.print(f"undisturbed run: {time.monotonic() - began:.0f} s, in {out}")
    seconds = seconds_by_rollout(whole)
    faults: list[str] = []
    done = runs = 0
    while done < options.kills and not faults:
        runs += 1
        killed = Attempts(out / f"killed_{runs}", command, options.every, rng)
        while done < options.kills and not faults and killed.newest() < options.rollouts:
            line, ended, fault = killed.attempt(AIMS[done % len(AIMS)], seconds)
            done += not ended
            console.print(f"{'no kill' if ended else f'kill {done}':<7} {line}")
            faults += [fault] if fault else []
        last = subprocess.run([*command, f"hydra.run.dir={killed.folder}", "resume=auto"], capture_output=True)
        if last.returncode:
            faults.append(f"the last resume failed: {last.stderr.decode(errors='replace')[-300:]}")
        else:
            faults += differences(whole, killed.folder)
    for fault in faults:
        console.print(f"[red]{fault}[/]")
    verdict = "[red]not equal[/]" if faults else "[green]equal, nothing lost[/]"
    console.print(f"{done} kills of {runs} runs, {time.monotonic() - began:.0f} s: {verdict}")
    return 1 if faults else 0


class Attempts:
    """A run that is started, killed and started again in one folder."""

    def __init__(self, folder: Path, command: list[str], every: int, rng: random.Random) -> None:
        self.folder, self.command, self.every, self.rng = folder, command, every, rng

    def newest(self) -> int:
        """The rollout of the newest checkpoint, -1 where there is none."""
        return max((int(p.stem[8:]) for p in self.folder.glob("checkpoints/rollout=*.ckpt")), default=-1)

    def attempt(self, aim: str, seconds: Seconds) -> tuple[str, bool, str]:
        """Start or resume the run and kill it at `aim` of one of the next rollouts: what happened, whether the run had
        ended before that, and a fault."""
        before = self.newest()
        rollout = min(max(before, 0) + self.rng.randint(1, self.every), max(seconds))
        if aim in ("checkpoint", "validate"):  # those come at the end of every so many rollouts
            rollout = min(-(-rollout // self.every) * self.every, max(seconds))
        self.began = time.time()
        output = self.folder.with_suffix(".log")
        with output.open("w") as file:
            child = subprocess.Popen(
                [*self.command, f"hydra.run.dir={self.folder}", "resume=auto"], cwd=ROOT, start_new_session=True,
                stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip
        reached = self._wait(child, aim, rollout, before, seconds)
        kill(child.pid)
        child.wait()
        parts = sorted(str(p.relative_to(self.folder)) for p in self.folder.rglob("*.part"))
        line = f"{aim:<10} of rollout {rollout:>2}, {time.time() - self.began:5.1f} s after its start; "
        line += f"checkpoint {before} -> {self.newest()}" + (f"; left {', '.join(parts)}" if parts else "")
        if child.returncode > 0 or not (reached or child.returncode == 0):
            return line, not reached, f"it failed: {' '.join(output.read_text(errors='replace').split())[-300:]}"
        return line, not reached, "a checkpoint was lost" if self.newest() < before else ""

    def _wait(self, child: "subprocess.Popen[bytes]", aim: str, rollout: int, before: int, seconds: Seconds) -> bool:
        """Wait for the moment; whether the run was still going on then."""
        checkpoint = self.folder / "checkpoints" / f"rollout={rollout:06d}.ckpt"
        collected = self.folder / "rollouts" / f"{rollout:06d}.jsonl"
        some, took = self.rng.random(), seconds[rollout]
        if aim == "checkpoint":
            part = checkpoint.with_name(checkpoint.name + ".part")
            return self._until(child, lambda: self._new(part) or self._new(checkpoint))
        if aim == "validate":
            going = self._until(child, lambda: self._new(collected))
            return going and self._sleep(child, took["update"] + some * took["validate"])
        if aim == "generate" and rollout > max(before, 0) + 1:
            earlier, last = self.folder / "rollouts" / f"{rollout - 1:06d}.jsonl", seconds[rollout - 1]
            going = self._until(child, lambda: self._new(earlier))
            return going and self._sleep(child, last["update"] + last["validate"] + some * took["generate"])
        # The first rollout of this start: from its very beginning for "any", else once training has begun.
        if aim == "any" and some < 0.3:
            return self._sleep(child, 10 * some)
        begun = self.folder / "overrides.yaml"
        going = self._until(child, lambda: self._new(begun if aim == "generate" else collected))
        return going and self._sleep(child, some * (took["generate"] if aim == "generate" else sum(took.values())))

    def _new(self, path: Path) -> bool:
        """Whether this attempt has written the file: an earlier one may have left it."""
        try:
            return path.stat().st_mtime > self.began
        except FileNotFoundError:
            return False

    def _until(self, child: "subprocess.Popen[bytes]", condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if child.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        return child.poll() is None

    def _sleep(self, child: "subprocess.Popen[bytes]", seconds: float) -> bool:
        time.sleep(seconds)
        return child.poll() is None


def kill(pid: int) -> None:
    """SIGKILL to a process and all that it has started, in whatever session."""
    family = [pid]
    for member in family:
        for file in Path(f"/proc/{member}/task").glob("*/children"):
            family += map(int, file.read_text().split())
    for member in family:
        try:
            os.kill(member, signal.SIGKILL)
        except ProcessLookupError:
            continue
    while any(Path(f"/proc/{member}/exe").exists() for member in family[1:]):  # pid itself is waited for by its parent
        time.sleep(0.01)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def seconds_by_rollout(folder: Path) -> Seconds:
    """Seconds by phase of each rollout of a run."""
    last_rows = {int(row["rollout"]): row for row in rows(folder)}
    return {
        rollout: {phase: float(row[f"time/{phase}_s"] or 0) for phase in ("generate", "update", "validate")}
        for rollout, row in last_rows.items()
    }


def differences(whole: Path, killed: Path) -> list[str]:
    """What differs between two run folders that should not."""
    found = []
    left, right = rows(whole), rows(killed)
    if [row["step"] for row in left] != [row["step"] for row in right]:
        found.append(f"metrics.csv has {len(left)} rows in the undisturbed run and {len(right)} in the other")
    for one, other in zip(left, right, strict=False):
        names = [name for name in one if not name.startswith(("time/", "speed/")) and one[name] != other.get(name)]
        found += [f"metrics.csv, step {one['step']}, {name}: {one[name]} and {other.get(name)}" for name in names]
    for place in ("rollouts", "validation", "checkpoints/model"):
        names = sorted({p.name for folder in (whole, killed) for p in (folder / place).iterdir()})
        for name in names:
            files = [folder / place / name for folder in (whole, killed)]
            if not all(file.exists() for file in files):
                found.append(f"{place}/{name} is in one of the runs only")
            elif files[0].read_bytes() != files[1].read_bytes():
                found.append(f"{place}/{name} differs")
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (whole, killed)]
    for name in ("status", "steps", "rollouts", "tokens_generated", "tokens_trained", "val_accuracy", "val_greedy"):
        if summaries[0][name] != summaries[1][name]:
            found.append(f"summary.json, {name}: {summaries[0][name]} and {summaries[1][name]}")
    return found


if __name__ == "__main__":
    sys.exit(main())
