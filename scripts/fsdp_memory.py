"""Memory of training in one process and with trainer=fsdp in two: what each process holds, and its peak.

    python scripts/fsdp_memory.py [--model PATH] [--devices 2]

Without --model a random model of the size and shape of SmolLM2-135M is made. Takes two short runs on the CPU, and about
3 GB for one process. Prints bytes of local parameters, gradients and optimiser state, and how far the resident memory
rose at most above what it was before the model was loaded. The exit code is 0 where the former is at most 0.55 of one
process's.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from grpo_lightning.distributed import local, rank
from grpo_lightning.model import TINY_MODEL

ROOT = Path(__file__).parent.parent
LIMIT = 0.55
# SmolLM2-135M: 134,515,008 parameters with tied embeddings.
SHAPE: dict[str, Any] = dict(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True,
)  # fmt: skip
OPTIONS = (
    "rollout=hf", "rollout.prompts=2", "rollout.group_size=2", "rollout.max_new_tokens=8", "trainer.max_epochs=2",
    "reward=[random]", "eval.reward=[exact]", "eval.prompts=2", "eval.samples=1", "kl=none", "logger=none",
    "update.micro_batch_tokens=32", "checkpoint.every=100",
)  # fmt: skip


class Memory(L.Callback):
    """Writes what this process holds after the first optimiser step, and its peak until then, to NUMBERS/rank.json."""

    def __init__(self, numbers: str) -> None:
        self.numbers = Path(numbers)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        file = self.numbers / f"{rank()}.json"
        if file.exists():
            return
        parameters = list(pl_module.parameters())
        states = [v for p in trainer.optimizers[0].state.values() for v in p.values() if isinstance(v, torch.Tensor)]
        gradients = [p.grad for p in parameters if p.grad is not None]
        held = sum(t.numel() * t.element_size() for t in map(local, [*parameters, *gradients, *states]))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        file.write_text(json.dumps({"held": held, "peak": peak}))


def measure(model: str, options: list[str], folder: Path) -> dict[str, float]:
    """The largest of each number over the processes of one run."""
    numbers = folder / "numbers"
    numbers.mkdir(parents=True)
    subprocess.run(
        [sys.executable, "train.py", f"model.path={model}", *OPTIONS, *options, f"hydra.run.dir={folder / 'run'}",
         "+callbacks.memory._target_=scripts.fsdp_memory.Memory", f"+callbacks.memory.numbers={numbers}"],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    found = [json.loads(file.read_text()) for file in numbers.iterdir()]
    return {name: max(values[name] for values in found) for name in found[0]}


def before_loading() -> int:
    """Resident memory of a process that has imported everything and loaded nothing."""
    code = "import resource, grpo_lightning.train; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--devices", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.model is None:
            options.model = str(folder / "model")
            torch.manual_seed(0)
            LlamaForCausalLM(LlamaConfig(**SHAPE, eos_token_id=0)).save_pretrained(options.model)
            AutoTokenizer.from_pretrained(TINY_MODEL).save_pretrained(options.model)
        base = before_loading()
        one = measure(options.model, ["trainer=cpu"], folder / "one")
        several = ["trainer=fsdp", "trainer.accelerator=cpu", f"trainer.devices={options.devices}"]
        many = measure(options.model, several, folder / "many")
    share, rise = many["held"] / one["held"], (many["peak"] - base) / (one["peak"] - base)
    print(f"held by one process: {one['held'] / 2**30:.2f} GiB of parameters, gradients and optimiser state")
    print(f"held by each of {options.devices}: {many['held'] / 2**30:.2f} GiB, {share:.3f} of that (limit {LIMIT})")
    print(
        f"peak above {base / 2**30:.2f} GiB before loading: {(one['peak'] - base) / 2**30:.2f} GiB in one process, "
        f"{(many['peak'] - base) / 2**30:.2f} GiB in each of {options.devices}, {rise:.2f} of that"
    )
    return 0 if share <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
