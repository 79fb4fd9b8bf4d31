"""Train the embedded model with every preset and several seeds, and put what they reached into docs/algorithms.md.

python scripts/algorithms.py            all presets, seeds 0 to 2, 30 rollouts; typed again, it goes on where it was
python scripts/algorithms.py --table    the document alone, from the runs that are there

A run whose folder holds a completed run is not repeated; an interrupted one is resumed from its newest checkpoint.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from rich.progress import Progress

from grpo_lightning.objective import load_objective
from grpo_lightning.objective.card import term
from grpo_lightning.objective.load import conf_dir
from grpo_lightning.objective.objective import GROUPS

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "algorithms.md"
# What an algorithm cannot do without; everything else is the same for all of them.
REWARDS = {"process": ["reward=[exact,process]"], "gdpo": ["reward=[exact,format]"]}
PRESETS = sorted(path.stem for path in (conf_dir() / "algorithm").glob("*.yaml"))
# Beside the presets: what is typed behind a preset's name.
VARIANTS = {"gtpo": ["advantage.together=true"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=PRESETS, choices=PRESETS, metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rollouts", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, each on one thread")
    parser.add_argument("--folder", type=Path, default=Path("outputs") / "algorithms")
    parser.add_argument("--table", action="store_true", help="write the document alone")
    options = parser.parse_args()
    if not options.table:
        chosen = [variant for preset in options.presets for variant in _variants(preset)]
        runs = [(variant, seed) for seed in options.seeds for variant in chosen]
        variants, seeds = zip(*runs, strict=True)
        with Progress() as bar, ThreadPoolExecutor(options.jobs) as pool:
            task = bar.add_task("runs", total=len(runs))
            failures = pool.map(run, variants, seeds, [options] * len(runs))
            for (variant, seed), failure in zip(runs, failures, strict=True):
                bar.advance(task)
                if failure:
                    bar.console.print(f"algorithm={variant} seed={seed} failed: {failure}")
    write(options.folder, options.rollouts)


def _variants(preset: str) -> list[str]:
    """The preset, and the preset with what is typed behind it."""
    return [preset, *(f"{preset} {more}" for more in VARIANTS.get(preset, []))]


def run(variant: str, seed: int, options: argparse.Namespace) -> str | None:
    """One run, unless it is there; returns what went wrong, if anything."""
    preset, *more = variant.split()
    folder = options.folder / variant.replace(" ", ",") / f"seed={seed}"
    if (summary := _summary(folder)) and summary["rollouts"] == options.rollouts:
        return None
    command = [
        sys.executable, "train.py", f"algorithm={preset}", *more, *REWARDS.get(preset, []), f"seed={seed}",
        "trainer=cpu", "logger=none", f"trainer.max_epochs={options.rollouts}", f"eval.every={options.rollouts}",
        "resume=auto", f"hydra.run.dir='{folder}'",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]


def _summary(folder: Path) -> dict[str, Any] | None:
    file = ROOT / folder / "summary.json"
    summary = json.loads(file.read_text()) if file.exists() else {}
    return summary if summary.get("status") == "completed" else None


def write(folder: Path, rollouts: int) -> None:
    """Put the table of algorithms and that of options between their marks in the document."""
    text = DOCUMENT.read_text()
    for mark, table in (("results", results(folder, rollouts)), ("options", option_table())):
        begin, end = f"<!-- {mark}: begin -->\n", f"<!-- {mark}: end -->"
        if begin not in text or end not in text:
            sys.exit(f"{DOCUMENT} has no marks for {mark}")
        text = text[: text.index(begin) + len(begin)] + table + text[text.index(end) :]
    DOCUMENT.write_text(text)
    print(f"written: {DOCUMENT}")


def results(folder: Path, rollouts: int) -> str:
    lines = [
        "| `algorithm=` | paper | what it changes | before | sampled after | each seed | greedy after | tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for variant in (variant for preset in PRESETS for variant in _variants(preset)):
        paper, changes = _comment(variant.split()[0]) if " " not in variant else ("", "")
        found = [_summary(path) for path in sorted((ROOT / folder / variant.replace(" ", ",")).glob("seed=*"))]
        runs = [summary for summary in found if summary and summary["rollouts"] == rollouts]
        if runs:
            after = [summary["val_accuracy"] for summary in runs]
            numbers = [
                f"{mean(s['val_accuracy_start'] for s in runs):.3f}", f"**{mean(after):.3f}**",
                " ".join(f"{value:.3f}" for value in after), f"{mean(s['val_greedy'] for s in runs):.3f}",
                f"{mean(s['tokens_generated'] for s in runs) / 1000:.0f} k",
            ]  # fmt: skip
        else:
            numbers = ["", "not run", "", "", ""]
        lines.append(" | ".join(["| `" + variant + "`", paper, changes, *numbers]) + " |")
    return "\n".join(lines) + "\n"


def _comment(preset: str) -> tuple[str, str]:
    """The paper, from the first comment of the preset, and what it changes, from the line that begins with "Fixes"."""
    comments = [
        line.removeprefix("# ")
        for line in (conf_dir() / "algorithm" / f"{preset}.yaml").read_text().splitlines()
        if line.startswith("# ") and not line.startswith("# @")
    ]
    changes = next((line.removeprefix("Fixes: ") for line in comments if line.startswith("Fixes: ")), "")
    return comments[0], changes


def option_table() -> str:
    lines = ["| option | formula, with its default numbers | source | tests |", "|---|---|---|---|"]
    files = {path.name: path.read_text() for path in sorted((ROOT / "tests" / "objective").glob("test_*.py"))}
    for group in GROUPS:
        for path in sorted((conf_dir() / group).glob("*.yaml")):
            option = getattr(load_objective([f"{group}={path.stem}", *_needed(group, path.stem)]), group)
            what = term(option)
            # Those that name the option or its class; the tests over all options are not repeated for each.
            names = (f'"{path.stem}"', f'={path.stem}"', f"{type(option).__name__}(")
            tests = [name for name, text in files.items() if any(each in text for each in names)]
            # A bar would end the cell.
            row = (f"`{group}={path.stem}`", *(text.replace("|", "\\|") for text in what), ", ".join(tests))
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def _needed(group: str, option: str) -> list[str]:
    """What an option cannot be composed without."""
    if group == "ratio":
        return ["algorithm=grpo_s" if option == "sequence_arithmetic" else "algorithm=grpo"]
    if group == "overlong":
        return ["overlong.max_length=48"] * option.startswith("soft")
    return ["loss_norm.length=48"] * (option == "constant")


if __name__ == "__main__":
    main()
