"""TRL's GRPOTrainer and ours side by side on a CPU: seconds of a step and peak memory.

    make setup-bench                                     TRL into .venv, and SmolLM2-135M
    python scripts/bench_vs_trl.py --json result.json    4 prompts x 8 completions, beta 0.04 and 0
    python scripts/bench_vs_trl.py --cells               one prompt x 8 completions of several lengths

Both do the same work: the same model in float32, the same prompts, one update per rollout, AdamW, and the same lengths
of the completions, row by row (8 to 48 tokens, 29 on average), imposed on both. Both generate through transformers in
their own process, and what each of them does beyond that is its default. Each runs in a process of its own; they take
their steps in turns (ours, TRL's, ours, TRL's, ...), so that a machine that slows down slows both. The first step of
each warms up and is not counted. A step is the time from the end of one optimiser step to the end of the next; the
medians are compared. The memory is the largest resident memory of each process up to its last step. Ours is `python
train.py`; TRL's micro-batch is the fastest of 4, 8, 16 and 32 rows here (--tune measures them anew).

--json PATH gets `speedup` and `memory_ratio` (ours over TRL's; of several betas the worst), both per beta under `betas`
with the seconds of each step and phase, and under `cells` the same of each cell. The file is written after every step;
--resume takes over what is complete in it. The exit code says nothing about who won.
"""

import argparse
import importlib.util
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from scripts.bench_common import (
    LENGTHS,
    WARM_UP_TOKENS,
    Child,
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

PROMPTS, GROUP_SIZE, PROMPT_TOKENS, LR = 4, 8, 45, 1e-5
TRL_ROWS = 32  # of TRL's micro-batch: the fastest of ROWS; --tune measures them again
ROWS = (4, 8, 16, 32)
CELL_ROW_TOKENS = 3072  # as many as a micro-batch of the main comparison has, prompts and padding included
CELLS = [(prompt, completion) for prompt in (32, 512) for completion in (32, 128, 512)]
# Columns of the table, and which phases of the clocks they are made of.
PHASES = {"generate": ("generate",), "reference and rewards": ("logps", "score"), "update": ("update",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beta", type=float, nargs="+", help="of the KL term; 0: no reference (default 0.04 0)")
    parser.add_argument("--steps", type=int, help="counted steps of each side (default 3)")
    parser.add_argument("--rows", type=int, help=f"rows in TRL's micro-batch (default {TRL_ROWS})")
    parser.add_argument("--tune", action="store_true", help=f"measure TRL's step with {ROWS} rows first; take the best")
    parser.add_argument("--cells", action="store_true", help="the six cells instead, at beta 0.04, one step each")
    parser.add_argument("--cell", type=_cell, nargs="+", help="these cells only, such as 32x128", metavar="PxL")
    parser.add_argument("--threads", type=int, default=cores(), help="of each side (default: every core)")
    parser.add_argument("--model", default="smollm2_135m", help="an option of conf/model")
    parser.add_argument("--ours", nargs="+", default=[], metavar="KEY=VALUE", help="further options of our run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resume", action="store_true", help="take over what is complete in the file of --json")
    options = parser.parse_args()
    cells = bool(options.cells or options.cell)
    if cells and (options.beta or options.steps is not None or options.tune):
        parser.error("cells have beta 0.04, one step and rows of their own: no --beta, --steps and --tune with them")
    options.beta, options.steps = options.beta or [0.04, 0.0], 3 if options.steps is None else options.steps
    if options.steps < 1 or options.threads < 1:
        parser.error("--steps and --threads must be at least 1")
    if any(beta < 0 for beta in options.beta):
        parser.error("--beta must be at least 0")
    total = GROUP_SIZE if cells else PROMPTS * GROUP_SIZE
    if options.rows is not None and (options.rows < 1 or total % options.rows):
        parser.error(f"--rows must divide the {total} completions")
    if options.rows and options.tune:
        parser.error("--tune finds out what --rows says: give one of them")
    if importlib.util.find_spec("trl") is None:
        sys.exit("TRL is not installed: run `make setup-bench`")
    path = model_path(options.model)
    settings = {
        "model": options.model, "threads": options.threads, "ours": options.ours, "rows": options.rows,
        "steps": options.steps,
    }  # fmt: skip
    results = Results(options.json, settings, options.resume)
    if cells:
        run_cells(options, path, results)
    else:
        run_betas(options, path, results)


def _cell(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text} is no PROMPTxCOMPLETION such as 32x128")
    return int(found[1]), int(found[2])


def run_betas(options: argparse.Namespace, path: str, results: Results) -> None:
    """The main comparison, for each beta."""
    rows = options.rows or TRL_ROWS
    if options.tune:
        rows = tune(options, path, results)
    betas = results.data.setdefault("betas", {})
    for beta in options.beta:
        key = f"{beta:g}"
        if not betas.get(key, {}).get("complete"):
            lengths = [list(LENGTHS)] * (1 + options.steps)

            def keep(measured: dict[str, Any], key: str = key) -> None:
                betas[key] = measured
                results.data |= worst(betas)
                results.save()

            compare(f"beta {key}", options, path, lengths, PROMPTS, PROMPT_TOKENS, beta, rows, keep)
    show(table(betas, "beta"))
    _print_worst(results.data)


def run_cells(options: argparse.Namespace, path: str, results: Results) -> None:
    """One prompt, one counted step per cell, after a short one."""
    cells = results.data.setdefault("cells", {})
    for prompt, completion in options.cell or CELLS:
        key = f"{prompt}x{completion}"
        if not cells.get(key, {}).get("complete"):
            rows = options.rows or cell_rows(prompt, completion)
            lengths = [[min(WARM_UP_TOKENS, completion)] * GROUP_SIZE, [completion] * GROUP_SIZE]

            def keep(measured: dict[str, Any], key: str = key) -> None:
                cells[key] = measured
                results.save()

            compare(f"cell {key}", options, path, lengths, 1, prompt, 0.04, rows, keep)
    show(table(cells, "prompt x completion"))


def cell_rows(prompt: int, completion: int) -> int:
    """Rows of TRL's micro-batch in a cell: the largest power of two whose tokens are at most CELL_ROW_TOKENS."""
    return max(rows for rows in (1, 2, 4, 8) if rows == 1 or rows * (prompt + completion) <= CELL_ROW_TOKENS)


def worst(measured: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The smallest speedup and the largest memory ratio of those that are there."""
    whole = [m for m in measured.values() if "speedup" in m]
    if not whole:
        return {}
    return {"speedup": min(m["speedup"] for m in whole), "memory_ratio": max(m["memory_ratio"] for m in whole)}


def ratios(ours: list[dict[str, Any]], trl: list[dict[str, Any]]) -> dict[str, Any]:
    """Both sides in short, `speedup` (TRL's seconds over ours) and `memory_ratio` (our peak over TRL's)."""
    sides = {"ours": summarise(ours), "trl": summarise(trl)}
    return {
        "speedup": sides["trl"]["step_s"] / sides["ours"]["step_s"],
        "memory_ratio": sides["ours"]["peak_rss_gb"] / sides["trl"]["peak_rss_gb"],
        **sides,
    }


def compare(
    name: str, options: argparse.Namespace, path: str, lengths: list[list[int]], prompts: int, prompt_tokens: int,
    beta: float, rows: int, keep: Callable[[dict[str, Any]], None],
) -> None:  # fmt: skip
    """Let both sides take `len(lengths)` steps in turns; `keep` gets what is known after each counted pair."""
    started = time.perf_counter()
    say(f"{name}: loading both")
    with tempfile.TemporaryDirectory(prefix="bench_") as place:
        folder = Path(place)
        write_prompts(folder, path, prompts, prompt_tokens)
        children = {
            "ours": start_ours(options, folder, lengths, prompts, beta),
            "trl": start_trl(options, path, folder, lengths, beta, rows),
        }
        reports: dict[str, list[dict[str, Any]]] = {side: [] for side in children}
        try:
            for child in children.values():
                child.answer()
            for number, imposed in enumerate(lengths):
                for side, child in children.items():
                    report = child.step()
                    check_lengths(side, report, imposed, prompt_tokens)
                    reports[side].append(report)
                    say(f"{name}: {side:4} {f'step {number}' if number else 'warm-up'}: {report['seconds']:.1f} s")
                if number:
                    keep(
                        {
                            **ratios(reports["ours"], reports["trl"]),
                            "trl_rows": rows,
                            "measured_in_s": time.perf_counter() - started,
                            "complete": number == len(lengths) - 1,
                        }
                    )
        finally:
            for child in children.values():
                child.close()


def start_ours(options: argparse.Namespace, folder: Path, lengths: list[list[int]], prompts: int, beta: float) -> Child:
    from scripts import bench_ours

    group_size = len(lengths[0]) // prompts
    run = bench_ours.overrides(options.model, folder, lengths, prompts=prompts, group_size=group_size, beta=beta, lr=LR)
    return bench_ours.start("ours", [*run, *options.ours], options.threads)


def start_trl(
    options: argparse.Namespace, path: str, folder: Path, lengths: list[list[int]], beta: float, rows: int
) -> Child:
    from grpo_lightning.model import load_tokenizer
    from scripts import bench_trl

    settings = {
        "path": path, "folder": str(folder), "imposed": lengths, "group_size": GROUP_SIZE, "beta": beta, "lr": LR,
        "rows": rows, "chat": load_tokenizer(path).chat_template is not None,
    }  # fmt: skip
    return bench_trl.start("trl", settings, options.threads)


def tune(options: argparse.Namespace, path: str, results: Results) -> int:
    """The rows of TRL's micro-batch with which its step is the fastest, at the first beta: one step each."""
    tuned = results.data.setdefault("trl_by_rows", {})
    for rows in ROWS:
        if str(rows) in tuned:
            continue
        with tempfile.TemporaryDirectory(prefix="bench_") as place:
            write_prompts(Path(place), path, PROMPTS, PROMPT_TOKENS)
            lengths = [[WARM_UP_TOKENS] * len(LENGTHS), list(LENGTHS)]
            child = start_trl(options, path, Path(place), lengths, options.beta[0], rows)
            try:
                child.answer()
                child.step()
                report = child.step()
            finally:
                child.close()
        tuned[str(rows)] = {name: report[name] for name in ("seconds", "cpu_s", "peak_rss_gb", "phases")}
        results.save()
        say(
            f"TRL with {rows} rows in a micro-batch: {report['seconds']:.1f} s ({report['cpu_s']:.1f} s of processor), "
            f"{report['peak_rss_gb']:.1f} GB"
        )
    return int(min(tuned, key=lambda rows: tuned[rows]["seconds"]))


def table(measured: dict[str, dict[str, Any]], what: str) -> Table:
    """Both sides of each point, and their ratios."""
    result = Table(title=f"seconds of a step (medians); {what} on the left", title_justify="left")
    for column in (what, "", "step", *PHASES, "other", "peak GB", "tokens", "mean length", "speedup"):
        result.add_column(column, justify="right")
    for key, point in measured.items():
        for side in ("ours", "trl"):
            numbers = point[side]
            phases = [sum(numbers["phases"].get(name, 0.0) for name in names) for names in PHASES.values()]
            result.add_row(
                key if side == "ours" else "",
                side,
                f"{numbers['step_s']:.2f}",
                *(f"{seconds:.2f}" for seconds in phases),
                f"{max(0.0, numbers['step_s'] - sum(phases)):.2f}",
                f"{numbers['peak_rss_gb']:.2f}",
                str(numbers["completion_tokens"]),
                f"{numbers['mean_length']:.1f}",
                f"{point['speedup']:.2f}" if side == "ours" else f"memory {point['memory_ratio']:.2f}",
            )
        result.add_section()
    return result


def _print_worst(data: dict[str, Any]) -> None:
    if "speedup" in data:
        print(f"speedup {data['speedup']:.2f}, memory ratio {data['memory_ratio']:.2f} (the worst of the betas)")


if __name__ == "__main__":
    command(main)
