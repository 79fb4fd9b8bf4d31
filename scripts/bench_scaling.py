"""How a step of ours grows: seconds and peak memory against completion length, prompt length and group size, on a CPU.

    python scripts/bench_scaling.py --json scaling.json                       every point
    python scripts/bench_scaling.py --points completion group 45x256x16       two sweeps, and a point of your own

A point is PROMPTxCOMPLETIONxG, tokens of the prompt and of every completion, and completions: one prompt, one update,
`python train.py` in a process of its own, one counted step after a short one that warms up. The sweeps: `completion`
(64 to 1024 tokens at a prompt of 45 and G=8), `prompt` (32 to 1024 tokens at a completion of 64 and G=8), `group` (G of
4 to 64 at 45 and 64 tokens), and `long`: 16 completions of 1024 tokens. The memory is the largest resident memory of
the process up to the end of that step.

The share of the machine is useful FLOP / (seconds of the step x the matrix rate). The matrix rate is what torch makes
of a float32 product of two 2048 x 2048 matrices with the same threads, measured right before each point. Useful is what
a step cannot do without, whatever the program really computes:

    A forward pass: 2 x the parameters that are not the embedding or the output projection (biases and norms included,
    which is next to nothing) for each token that goes through the layers; 2 x vocabulary x hidden size for each
    position whose next token is wanted; and 4 x heads x head size x layers for each pair of a token and one that it
    attends to, itself included (scores and weighted values, the causal half of them).
    A prompt goes through the layers once per group; of a completion of n tokens n - 1 do, since the last one predicts
    nothing. After the prompt one position is wanted for the whole group, then n - 1 for each completion.
    A step is one forward pass for generation, one for the reference policy where beta > 0, and three for the update:
    one forward, and a backward pass that costs two.

So padding, a prompt computed again, activations or logits computed again and the passes of a generation that reads all
weights for a few rows all lower the share, and so does everything that is not a matrix product (softmax, norms,
sampling, the optimiser), which is not counted.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from scripts.bench_common import (
    WARM_UP_TOKENS,
    Results,
    check_lengths,
    command,
    cores,
    model_path,
    say,
    show,
    summarise,
    write_prompts,
)

SWEEPS = {
    "completion": [(45, completion, 8) for completion in (64, 128, 256, 512, 1024)],
    "prompt": [(prompt, 64, 8) for prompt in (32, 64, 128, 256, 512, 1024)],
    "group": [(45, 64, size) for size in (4, 8, 16, 32, 64)],
    "long": [(45, 1024, 16)],
}
# Columns of the table, and which phases of the run's clock they are made of.
PHASES = {"generate": ("generate",), "reference": ("logps", "score"), "update": ("update",)}
SIDE = 2048  # of the square matrices whose product gives the matrix rate
LR = 1e-5
BAR = 24  # characters of the longest bar


@dataclass(frozen=True)
class Sizes:
    """What the FLOP of a model depend on: parameters in the layers and in the output projection, and its attention."""

    body: int
    head: int
    layers: int
    heads: int
    head_dim: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", nargs="+", default=list(SWEEPS), metavar="SWEEP|PxLxG")
    parser.add_argument("--beta", type=float, default=0.04, help="of the KL term; 0: no reference policy")
    parser.add_argument("--steps", type=int, default=1, help="counted steps of each point (default 1)")
    parser.add_argument("--threads", type=int, default=cores(), help="default: every core")
    parser.add_argument("--model", default="smollm2_135m", help="an option of conf/model")
    parser.add_argument("--ours", nargs="+", default=[], metavar="KEY=VALUE", help="further options of the run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resume", action="store_true", help="take over what is in the file of --json")
    options = parser.parse_args()
    if options.steps < 1 or options.threads < 1:
        parser.error("--steps and --threads must be at least 1")
    if options.beta < 0:
        parser.error("--beta must be at least 0")
    try:
        wanted = chosen(options.points)
    except ValueError as error:
        parser.error(str(error))
    path = model_path(options.model)
    settings = {name: getattr(options, name) for name in ("model", "threads", "beta", "steps", "ours")}
    results = Results(options.json, settings, options.resume)
    points = results.data.setdefault("points", {})
    model = sizes(path)
    for number, (prompt, completion, size) in enumerate(wanted, 1):
        key = f"{prompt}x{completion}x{size}"
        if key not in points:
            say(f"point {number} of {len(wanted)}: {key}")
            points[key] = measure(options, path, model, prompt, completion, size)
            results.save()
            say(f"  {points[key]['step_s']:.1f} s, {points[key]['peak_rss_gb']:.2f} GB")
    for name, some in by_sweep(wanted).items():
        show(table(name, some, points))


def chosen(names: list[str]) -> list[tuple[int, int, int]]:
    """The points that names of sweeps and PxLxG mean, each once. Raises ValueError for anything else."""
    found: list[tuple[int, int, int]] = []
    for name in names:
        try:
            some = SWEEPS[name] if name in SWEEPS else [_point(name)]
        except ValueError as error:
            raise ValueError(f"--points {name}: one of {', '.join(SWEEPS)}, or a point such as 45x64x8") from error
        found += [point for point in some if point not in found]
    return found


def _point(text: str) -> tuple[int, int, int]:
    prompt, completion, size = map(int, text.split("x"))
    if min(prompt, completion) < 1 or size < 2:
        raise ValueError("a group has at least two completions of at least one token")
    return prompt, completion, size


def by_sweep(wanted: list[tuple[int, int, int]]) -> dict[str, list[tuple[int, int, int]]]:
    """The points under the sweeps that they belong to; a point may be in several."""
    tables = {name: [point for point in some if point in wanted] for name, some in SWEEPS.items()}
    own = [point for point in wanted if not any(point in some for some in SWEEPS.values())]
    return {name: some for name, some in {**tables, "points": own}.items() if some}


def measure(
    options: argparse.Namespace, path: str, model: Sizes, prompt: int, completion: int, size: int
) -> dict[str, Any]:
    """Let a run take its steps at one point; seconds, memory, and the share of the machine."""
    from scripts import bench_ours

    rate = matrix_rate(options.threads)
    lengths = [[min(WARM_UP_TOKENS, completion)] * size] + [[completion] * size] * options.steps
    with tempfile.TemporaryDirectory(prefix="bench_") as place:
        folder = Path(place)
        write_prompts(folder, path, 1, prompt)
        run = bench_ours.overrides(options.model, folder, lengths, prompts=1, group_size=size, beta=options.beta, lr=LR)
        more = [f"rollout.engine.max_rows={max(256, size)}"]
        child = bench_ours.start("ours", [*run, *more, *options.ours], options.threads)
        try:
            child.answer()
            reports = [child.step() for _ in lengths]
        finally:
            child.close()
    for report, imposed in zip(reports, lengths, strict=True):
        check_lengths("ours", report, imposed, prompt)
    forward = forward_flop(model, prompt, lengths[-1])
    passes = {"generate": 1, "reference": 1 if options.beta else 0, "update": 3}
    numbers = summarise(reports)
    useful = forward * sum(passes.values())
    took = {column: phase_seconds(numbers, column) for column in PHASES}
    shares = {name: forward * count / (took[name] * rate) for name, count in passes.items() if count}
    return {
        **numbers, "matrix_gflop_s": rate / 1e9, "useful_gflop": useful / 1e9,
        "share": useful / (numbers["step_s"] * rate), "shares_of_phases": shares, "model": asdict(model),
    }  # fmt: skip


def phase_seconds(numbers: dict[str, Any], column: str) -> float:
    """Seconds of a step in the phases of a column."""
    return sum(numbers["phases"].get(name, 0.0) for name in PHASES[column])


def matrix_rate(threads: int) -> float:
    """FLOP per second of a float32 matrix product: the median of seven."""
    import torch

    torch.set_num_threads(threads)
    a, b = torch.rand(SIDE, SIDE), torch.rand(SIDE, SIDE)
    seconds = []
    for _ in range(8):
        started = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - started)
    return 2 * SIDE**3 / statistics.median(seconds[1:])


def sizes(path: str) -> Sizes:
    """Of the model in a folder, without loading its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tables = {id(module.weight): module.weight for module in (model.get_input_embeddings(), model.lm_head)}
    total = sum(parameter.numel() for parameter in model.parameters())
    return Sizes(
        body=total - sum(weight.numel() for weight in tables.values()),
        head=model.lm_head.weight.numel(),
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    )


def forward_flop(model: Sizes, prompt: int, lengths: list[int]) -> int:
    """Useful FLOP of one forward pass over a group: its prompt once, and all its completions (module docstring)."""
    through = [n - 1 for n in lengths]
    tokens = prompt + sum(through)
    wanted = 1 + sum(through)
    pairs = prompt * (prompt + 1) // 2 + sum(n * prompt + n * (n + 1) // 2 for n in through)
    attention = 4 * model.heads * model.head_dim * model.layers
    return 2 * model.body * tokens + 2 * model.head * wanted + attention * pairs


def table(name: str, wanted: list[tuple[int, int, int]], points: dict[str, dict[str, Any]]) -> Table:
    """The points of a sweep, with bars for seconds and memory."""
    result = Table(title=f"{name}: prompt x completion x G", title_justify="left")
    for column in ("point", "seconds", "", "peak GB", "", *PHASES, "tokens/s", "share"):
        result.add_column(column, justify="left" if column == "" else "right", no_wrap=True)
    rows = [(f"{p}x{c}x{g}", points[f"{p}x{c}x{g}"]) for p, c, g in wanted]
    longest = max(numbers["step_s"] for _, numbers in rows)
    largest = max(numbers["peak_rss_gb"] for _, numbers in rows)
    for key, numbers in rows:
        result.add_row(
            key,
            f"{numbers['step_s']:.2f}",
            "█" * round(BAR * numbers["step_s"] / longest),
            f"{numbers['peak_rss_gb']:.2f}",
            "█" * round(BAR * numbers["peak_rss_gb"] / largest),
            *(f"{phase_seconds(numbers, column):.2f}" for column in PHASES),
            f"{numbers['completion_tokens'] / numbers['step_s']:.0f}",
            f"{numbers['share']:.0%}",
        )
    return result


if __name__ == "__main__":
    command(main)
