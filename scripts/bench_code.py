"""How many answers reward=code judges in a second: scripts/bench_code.py HumanEval.jsonl.gz [WORKERS ...]"""

import gzip
import json
import sys
import time

from grpo_lightning.reward import RewardBatch
from grpo_lightning.reward.code import Code


def main(path: str, *workers: str) -> None:
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    columns = {name: [row[name] for row in rows] for name in ("prompt", "test", "entry_point")}
    for form, completions, expected in (
        ("right", [row["canonical_solution"] for row in rows], 1.0),
        ("wrong", ["    pass\n" for _ in rows], 0.0),
    ):
        batch = RewardBatch(columns["prompt"], completions, [None] * len(rows), columns)
        for count in workers or ("1", "2", "4"):
            component = Code(workers=int(count))
            start = time.perf_counter()
            scores = component(batch)
            seconds = time.perf_counter() - start
            component.close()
            agree = sum(score == expected for score in scores)
            print(f"{form}: {agree} of {len(rows)} as expected, {count} workers, {len(rows) / seconds:.1f} per second")


if __name__ == "__main__":
    main(*sys.argv[1:])
