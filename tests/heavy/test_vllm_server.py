"""Training through the real vLLM in a process of its own: it learns, it samples from the weights that it says, and it
survives the loss of that process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_lightning.rollout.engine import Request, SamplingParams
from grpo_lightning.rollout.vllm_server import VLLMServerEngine
from tests.heavy.kill_server import PROMPTS as ROLLOUT_PROMPTS
from tests.heavy.runs import ROOT, Result, train
from tests.models import llama
from tests.rollout.test_vllm_engine import PROMPTS, gap, requests

pytestmark = pytest.mark.heavy

# Rollouts that change the weights: a coin is the reward.
FOUR = (
    "rollout=vllm_server", "trainer.max_epochs=4", f"rollout.prompts={ROLLOUT_PROMPTS}", "rollout.group_size=8",
    "rollout.max_new_tokens=48", "reward=[random]", "eval.reward=[exact]", "optimizer.lr=0.001", "eval.prompts=8",
    "eval.samples=1", "eval.every=100", "trainer=cpu", "logger=none",
)  # fmt: skip


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def model(request) -> torch.nn.Module:
    return llama(
        0, hidden_size=64, max_position_embeddings=256, tie_word_embeddings=request.param, initializer_range=0.3
    )


def test_log_probabilities_are_those_of_the_policy_before_and_after_a_sync(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    engine = VLLMServerEngine(
        launch=True, url=None, model=str(tmp_path / "model"), precision="32-true", max_model_len=None,
        gpu_memory_utilization=0.3, host="127.0.0.1", port=0, devices=None, weights="folder", weights_dir=None,
        start_timeout=600, patience=120, retries=0, options={}, log=str(tmp_path / "server.log"),
    )  # fmt: skip
    params = SamplingParams(12, 0.8, (2, 7))
    try:
        for version, change in ((3, 0.0), (4, 0.1)):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += change * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            if version == 4:
                assert gap(engine.generate(requests(8), params), model, 0.8) > 0.1, "the engine has the old weights"
            engine.sync(model, version)
            groups = engine.generate(requests(8), params)
            assert gap(groups, model, 0.8) < 1e-3
            # The seeds decide. How requests meet in a batch is another each time, so the last digits may differ.
            again = [c.token_ids for group in engine.generate(requests(8), params) for c in group]
            same = [c.token_ids == ids for c, ids in zip((c for g in groups for c in g), again, strict=True)]
            assert sum(same) >= 0.9 * len(same)
            assert {c.weights_version for group in groups for c in group} == {version}
            assert [len(group) for group in groups] == [8] * len(PROMPTS)
        # More prompt tokens than vLLM takes in one step: it would split a prompt over two.
        generator = torch.Generator().manual_seed(2)
        long = [
            Request(tuple(torch.randint(3, 11, (100,), generator=generator).tolist()), (0, 0, 2, k), 4)
            for k in range(60)
        ]
        assert [len(group) for group in engine.generate(long, params)] == [4] * 60
    finally:
        engine.close()


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_default_run_learns_as_through_hf(tmp_path, hf_run, ahead):
    options = ("rollout=vllm_server", f"rollout.ahead={ahead}", "logger=none", "trainer=cpu")
    run = train(tmp_path / "run", *options, timeout=900)
    assert run.summary["val_accuracy_start"] < 0.5 < 0.9 < run.summary["val_accuracy"]
    assert abs(run.summary["val_accuracy"] - hf_run.summary["val_accuracy"]) <= 0.03
    staleness = {number: {row["staleness"] for row in rows} for number, rows in rollouts(run.folder).items()}
    assert staleness == {number: {0 if number == 1 else ahead} for number in range(1, 41)}
    assert len(run.gaps) == 40 and max(run.gaps) < 1e-3, run.gaps


def rollouts(folder: Path) -> dict[int, list[dict]]:
    """The records of each rollout."""
    files = sorted((folder / "rollouts").glob("*.jsonl"))
    return {number: [json.loads(line) for line in open(file)] for number, file in enumerate(files, 1)}


def completions(folder: Path) -> list[list[tuple]]:
    """What each rollout sampled, in its order of prompts."""
    return [
        sorted((row["group_id"], row["prompt"], row["completion"], row["length"]) for row in rows)
        for rows in rollouts(folder).values()
    ]


def test_a_killed_server_costs_time_and_no_completion(tmp_path):
    undisturbed: Result = train(tmp_path / "undisturbed", *FOUR, timeout=600)
    program = ("-m", "tests.heavy.kill_server")
    killed = train(tmp_path / "killed", *FOUR, timeout=600, program=program)
    assert killed.output.count("the vLLM server was lost") == 1 and "restarting it" in killed.output
    assert killed.summary["status"] == "completed" and killed.summary["rollouts"] == 4
    for rows in completions(killed.folder):
        groups = [row[0] for row in rows]
        assert len(set(groups)) == ROLLOUT_PROMPTS and {groups.count(group) for group in groups} == {8}
    # The same completions but for what the last digits decide: requests meet in other batches.
    pairs = zip(completions(killed.folder)[:3], completions(undisturbed.folder)[:3], strict=True)
    same = [left == right for lefts, rights in pairs for left, right in zip(lefts, rights, strict=True)]
    assert sum(same) >= 0.98 * len(same)
    assert max(killed.gaps) < 1e-3, killed.gaps

    done = subprocess.run(
        [sys.executable, *program, *FOUR, "rollout.engine.retries=0", f"hydra.run.dir={tmp_path / 'ended'}"],
        cwd=ROOT, capture_output=True, text=True, timeout=600, env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"},
    )  # fmt: skip
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "grpo_lightning:" in line]
    assert "the run failed: the vLLM server was lost 1 times in a row" in line and "retries=0" in line
    assert str(tmp_path / "ended" / "vllm_server.log") in line and "resume=FOLDER" in line
    assert json.loads((tmp_path / "ended" / "summary.json").read_text())["status"] == "failed"
