"""Train on a GPU in the ways that a CPU cannot check, and say what came out: at most 8 minutes.

    python scripts/gpu_check.py               needs a CUDA GPU; vLLM is not needed
    python scripts/gpu_check.py --cpu         the same runs, smaller, to see that the script itself works

Each check is a short run of the command: bf16-mixed, fsdp with one process, activation checkpointing, LoRA. A line per
check has tokens per second, peak memory and PASS or FAIL; the exit code is 0 if all passed. The model is random, of
about 0.3 billion parameters, with the embedded model's tokenizer; its answers mean nothing, their gradients do.
"""

import argparse
import csv
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from grpo_lightning.model import TINY_MODEL

ROOT = Path(__file__).parent.parent
SECONDS = 110  # for each of the checks
LARGE: dict[str, Any] = dict(
    hidden_size=1024, intermediate_size=2816, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=4
)
SMALL: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
)
CHECKS: dict[str, list[str]] = {
    "float32": ["trainer.precision=32-true"],
    "bf16-mixed": ["trainer.precision=bf16-mixed"],
    "fsdp, one process": ["trainer=fsdp", "trainer.devices=1", "trainer.precision=bf16-mixed"],
    "activation checkpointing": ["trainer.precision=bf16-mixed", "trainer.activation_checkpointing=true"],
    "LoRA": ["trainer.precision=bf16-mixed", "model.lora.r=16"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        sys.exit("there is no CUDA GPU here; --cpu tries the script itself")
    print(f"{'CPU' if options.cpu else torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", SMALL if options.cpu else LARGE)
        for number, (check, overrides) in enumerate(CHECKS.items()):
            line, passed = one(folder / f"check_{number}", folder / "model", overrides, options.cpu)
            failed += not passed
            print(f"{'PASS' if passed else 'FAIL'}  {check}: {line}", flush=True)
    return 1 if failed else 0


def make_model(folder: Path, shape: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    torch.manual_seed(0)
    config = LlamaConfig(
        **shape, vocab_size=len(tokenizer), max_position_embeddings=1024, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def one(folder: Path, model: Path, overrides: list[str], cpu: bool) -> tuple[str, bool]:
    """Run one check; what to print about it, and whether it passed."""
    size = ["rollout.prompts=2", "rollout.group_size=4", "rollout.max_new_tokens=16"]
    if not cpu:
        size = ["rollout.prompts=8", "rollout.group_size=8", "rollout.max_new_tokens=128"]
    # The trainer first: trainer=fsdp beside it chooses another option of the same group.
    trainer = [] if any(o.startswith("trainer=") for o in overrides) else ["trainer=auto"]
    command = [
        sys.executable, "train.py", f"model.path={model}", "rollout=hf", *size, *trainer, *overrides,
        f"trainer.accelerator={'cpu' if cpu else 'gpu'}", "trainer.max_epochs=3", "reward=[random]",
        "eval.reward=[exact]", "eval.prompts=4", "eval.samples=1", "logger=none", "optimizer.lr=1e-4", "kl=k3",
        f"hydra.run.dir={folder}",
    ]  # fmt: skip
    started = time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"not done after {SECONDS} s", False
    if done.returncode:
        return f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}", False
    summary = json.loads((folder / "summary.json").read_text())
    with (folder / "metrics.csv").open(newline="") as file:
        rows = [{name: float(value or "nan") for name, value in row.items()} for row in csv.DictReader(file)]
    last = rows[-1]
    problems = [
        *(f"{name} is {row[name]}" for row in rows for name in ("policy/loss", "policy/grad_norm", "policy/kl")
          if not math.isfinite(row[name])),
        *(["the policy did not move from the reference"] if last["policy/kl"] <= 0 else []),
        *([f"the first KL is {rows[0]['policy/kl']:.2g}"] if rows[0]["policy/kl"] > 1e-3 else []),
        *([f"engine and trainer differ by {last['sampler/logp_gap_mean']:.2g} a token"]
          if last["sampler/logp_gap_mean"] > 0.05 else []),
    ]  # fmt: skip
    memory = f"{summary['peak_cuda_gb']:.2f} GB of the GPU" if "peak_cuda_gb" in summary else "the GPU was not used"
    line = (
        f"{last['speed/generated_tokens_per_s']:.0f} tokens/s generated, {last['speed/trained_tokens_per_s']:.0f} "
        f"trained, peak {memory}, {time.monotonic() - started:.0f} s in all"
    )
    return "; ".join([line, *dict.fromkeys(problems)]), not problems


if __name__ == "__main__":
    sys.exit(main())
