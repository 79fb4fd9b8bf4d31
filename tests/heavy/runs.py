"""Runs for the heavy tests, each in a child process of its own: vLLM changes the torch that it shares."""

import csv
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A few rollouts that change the weights a lot, whatever the model writes: a coin is the reward.
SHORT = (
    "trainer.max_epochs=6", "rollout.prompts=16", "rollout.max_new_tokens=48", "reward=[random]", "eval.reward=[exact]",
    "optimizer.lr=0.001", "eval.prompts=8", "eval.samples=1", "eval.every=100", "trainer=cpu", "logger=none",
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What a run left in its folder."""

    folder: Path
    output: str

    @property
    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def gaps(self) -> list[float]:
        """The largest distance between the engine's and the trainer's log-probabilities at each optimiser step."""
        with (self.folder / "metrics.csv").open(newline="") as file:
            return [float(row["sampler/logp_gap_max"]) for row in csv.DictReader(file)]


def train(folder: Path, *options: str, timeout: float, program: tuple[str, ...] = ("train.py",)) -> Result:
    """`python train.py OPTIONS` into `folder`; `program` is what stands in for train.py. It must end well."""
    done = subprocess.run(
        [sys.executable, *program, *options, f"hydra.run.dir={folder}"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout,
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return Result(folder, done.stdout)
