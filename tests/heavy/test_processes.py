"""The same run in one process and in several (gloo): prompts, completions, gradients, parameters, metrics, files."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.heavy
PROCESSES = [("ddp", 2), ("fsdp", 2), ("ddp", 4), ("fsdp", 4)]
# Rewards that vary in every group, so that every token has a gradient.
LEARNS = ["reward=[random]", "eval.reward=[exact]", "rollout.prompts=6", "rollout=hf"]


def run(*options: object, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own. A hang is a failure."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "grpo_lightning.train", *map(str, options)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


def finish(folder: Path, *options: object) -> Path:
    done = run(*options, f"hydra.run.dir={folder}")
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    return folder


def several(strategy: str, count: int) -> list[str]:
    return [f"trainer={strategy}", "trainer.accelerator=cpu", f"trainer.devices={count}"]


def records(folder: Path, number: int) -> list[dict]:
    return [json.loads(line) for line in (folder / "rollouts" / f"{number:06d}.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict:
    return load_file(folder / "checkpoints" / "model" / "model.safetensors")


def largest_difference(left: Path, right: Path, start: dict) -> float:
    """Of how far the parameters of two runs have moved, relative to the farthest of each tensor."""
    worst = 0.0
    for name, before in start.items():
        moved = weights(left)[name] - before
        worst = max(worst, float((weights(right)[name] - before - moved).abs().max() / moved.abs().max()))
    return worst


def start_of(toy: list[str]) -> dict:
    return load_file(Path(next(o for o in toy if o.startswith("model.path=")).partition("=")[2]) / "model.safetensors")


@pytest.fixture(scope="module")
def one_step(toy, tmp_path_factory):
    """One plain gradient step, so long that what is rounded off of the parameters does not count."""
    options = [
        *toy, *LEARNS, "trainer.max_epochs=1", "optimizer._target_=torch.optim.SGD", "optimizer.lr=100",
        "optimizer.max_grad_norm=null", "kl=k3", "update.micro_batch_tokens=60",
    ]  # fmt: skip
    return options, finish(tmp_path_factory.mktemp("one") / "step", *options, "trainer=cpu")


@pytest.fixture(scope="module")
def five_steps(toy, tmp_path_factory):
    options = [*toy, *LEARNS, "trainer.max_epochs=5", "kl=k3"]
    return options, finish(tmp_path_factory.mktemp("five") / "steps", *options, "trainer=cpu")


@pytest.mark.parametrize(("strategy", "count"), PROCESSES)
def test_the_gradient_of_a_step_does_not_depend_on_the_number_of_processes(strategy, count, one_step, toy, tmp_path):
    options, single = one_step
    folder = finish(tmp_path / "several", *options, *several(strategy, count))
    assert largest_difference(single, folder, start_of(toy)) < 1e-5


FAMILY = [
    ("ddp", ["algorithm=ppo", "critic=model", "reward=[random]"]),
    ("ddp", ["algorithm=ppo", "critic=head", "entropy=kl_cov", "entropy.fraction=0.3"]),
    ("fsdp", ["algorithm=gtpo", "entropy=top", "reward=[exact,random]"]),
    ("fsdp", ["algorithm=dcpo", "entropy=bonus", "sampling=frontier", "reward=[random,exact]"]),
]


@pytest.mark.parametrize(("strategy", "chosen"), FAMILY, ids=["critic_model", "critic_head", "gtpo", "dcpo"])
def test_two_processes_take_the_steps_of_one_in_the_whole_family(strategy, chosen, toy, tmp_path):
    options = [
        *toy, *LEARNS, *chosen, "trainer.max_epochs=1", "optimizer._target_=torch.optim.SGD", "optimizer.lr=30",
        "optimizer.max_grad_norm=null", "update.micro_batch_tokens=60",
    ]  # fmt: skip
    one = finish(tmp_path / "one", *options, "trainer=cpu")
    two = finish(tmp_path / "two", *options, *several(strategy, 2))
    for mine, theirs in zip(records(one, 1), records(two, 1), strict=True):
        # Rows are scored in other packs, so what an advantage takes from the policy or the critic is rounded otherwise.
        assert mine.pop("advantage") == pytest.approx(theirs.pop("advantage"), rel=1e-4, abs=1e-5)
        assert mine == theirs
    assert largest_difference(one, two, start_of(toy)) < 1e-5


@pytest.mark.parametrize(("strategy", "count"), PROCESSES[:2])
def test_five_steps_take_the_same_prompts_completions_and_parameters(strategy, count, five_steps, toy, tmp_path):
    options, single = five_steps
    folder = finish(tmp_path / "several", *options, *several(strategy, count))
    assert same_but_rounding(folder, single, 1) == 1
    for number in range(2, 6):
        assert same_but_rounding(folder, single, number) >= 0.99
    for name, values in weights(single).items():
        assert float((weights(folder)[name] - values).abs().max() / values.abs().max()) < 1e-5, name
    left, right = (pd.read_csv(path / "metrics.csv") for path in (single, folder))
    assert list(left.columns) == list(right.columns)
    for name in left.columns:
        if not name.startswith(("time/", "speed/")):
            np.testing.assert_allclose(right[name], left[name], rtol=2e-3, atol=1e-5, err_msg=name)
    summaries = [json.loads((path / "summary.json").read_text()) for path in (single, folder)]
    for name in ("steps", "rollouts", "tokens_generated", "tokens_trained", "status"):
        assert summaries[0][name] == summaries[1][name]


def same_but_rounding(left: Path, right: Path, number: int) -> float:
    """The share of completions that are alike; prompts and their order must be the same."""
    pairs = list(zip(records(left, number), records(right, number), strict=True))
    assert all(a["prompt_id"] == b["prompt_id"] and a["group_id"] == b["group_id"] for a, b in pairs)
    return sum(a["completion"] == b["completion"] for a, b in pairs) / len(pairs)


def test_dynamic_sampling_filters_and_uneven_lengths_go_on_in_step(toy, tmp_path):
    options = [
        *toy, "algorithm=dapo", "overlong=soft_filter", "rollout.prompts=5", "update.minibatches=2", "rollout=hf",
        "update.micro_batch_tokens=40", "trainer.max_epochs=3",
    ]  # fmt: skip
    single = finish(tmp_path / "single", *options, "trainer=cpu")
    folder = finish(tmp_path / "several", *options, *several("fsdp", 2))
    for number in (1, 2, 3):
        assert same_but_rounding(folder, single, number) >= 0.99
    left, right = (pd.read_csv(path / "metrics.csv") for path in (single, folder))
    for name in ("step", "sampling/draws", "sampling/groups", "sampling/groups_kept_for_next", "update/tokens"):
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def test_processes_without_a_row_take_part_and_count_for_nothing(toy, tmp_path):
    # Minibatches of one group of three rows: of four processes one has none, and repeats a row.
    options = [
        *toy, *LEARNS[:2], "rollout=hf", "rollout.prompts=4", "rollout.group_size=3", "update.minibatches=4",
        "trainer.max_epochs=1", "optimizer._target_=torch.optim.SGD", "optimizer.lr=10", "optimizer.max_grad_norm=null",
    ]  # fmt: skip
    single = finish(tmp_path / "single", *options, "trainer=cpu")
    folder = finish(tmp_path / "several", *options, *several("fsdp", 4))
    left, right = (pd.read_csv(path / "metrics.csv") for path in (single, folder))
    assert len(left) == 4
    for name in left.columns:
        if not name.startswith(("time/", "speed/")):
            np.testing.assert_allclose(right[name], left[name], rtol=2e-3, atol=1e-5, err_msg=name)
    assert largest_difference(single, folder, start_of(toy)) < 1e-3


@pytest.mark.parametrize("count", [1, 2])
def test_fsdp_samples_ahead_with_the_weights_it_has_trained(count, toy, tmp_path):
    threaded = ["rollout=vllm_server", "rollout.engine._target_=tests.heavy.engines.ThreadedWhole", "rollout.ahead=1"]
    options = [*toy, *LEARNS[:2], *threaded, "rollout.prompts=6", "update.minibatches=2", "trainer.max_epochs=3"]
    single = finish(tmp_path / "single", *options, "trainer=cpu")
    folder = finish(tmp_path / "sharded", *options, *several("fsdp", count))
    for number in (1, 2, 3):
        assert same_but_rounding(folder, single, number) >= 0.99
    for name, values in weights(single).items():
        assert float((weights(folder)[name] - values).abs().max() / values.abs().max()) < 1e-4, name
    assert pd.read_csv(folder / "metrics.csv")["sampler/logp_gap_max"].max() < 1e-4


def test_the_cause_of_a_failure_is_told_whichever_process_it_strikes(toy, tmp_path):
    options = [*toy, "rollout=hf", *several("ddp", 2), "reward=[function]", "eval.reward=[exact]"]
    options += ["reward.function.path=tests.heavy.rewards.breaks_in_process_1"]
    done = run(*options, f"hydra.run.dir={tmp_path / 'r'}")
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert done.returncode == 1 and summary["status"] == "failed"
    assert "process 1 of 2: " in summary["message"] and "gave 1 scores for 8 completions" in summary["message"]
    assert done.stderr.count("the run failed") == 1 and summary["message"] in done.stderr


def test_a_reward_that_fails_on_one_process_rows_alone_is_no_failure(toy, tmp_path):
    options = [*toy, "rollout=hf", *several("ddp", 2), "reward=[function]", "eval.reward=[exact]"]
    options += ["reward.function.path=tests.heavy.rewards.cannot_score_in_process_1", "trainer.max_epochs=1"]
    folder = finish(tmp_path / "run", *options)
    rewards = [record["reward"] for record in records(folder, 1)]
    assert len(rewards) == 16 and sum(reward is None for reward in rewards) == 8


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_goes_on_with_another_number_of_processes(strategy, five_steps, toy, tmp_path):
    options, single = five_steps
    folder = tmp_path / "run"
    finish(folder, *options, *several(strategy, 2), "trainer.max_epochs=3")
    done = run(f"resume={folder}", "trainer.max_epochs=5", "trainer.devices=1")
    assert done.returncode == 0, done.stderr[-3000:]
    for number in range(1, 6):
        assert same_but_rounding(folder, single, number) >= 0.99
    for name, values in weights(single).items():
        assert float((weights(folder)[name] - values).abs().max() / values.abs().max()) < 1e-5, name
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["resumed_from_step"] == 3 and summary["steps"] == 5


def test_the_same_number_of_processes_resumes_bit_for_bit(five_steps, toy, tmp_path):
    options, _ = five_steps
    whole = finish(tmp_path / "whole", *options, *several("fsdp", 2))
    part = finish(tmp_path / "part", *options, *several("fsdp", 2), "trainer.max_epochs=2")
    assert run(f"resume={part}", "trainer.max_epochs=5").returncode == 0
    for number in range(1, 6):
        assert records(whole, number) == records(part, number)
    files = [path / "checkpoints" / "model" / "model.safetensors" for path in (whole, part)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_death_of_a_process_ends_the_run_with_a_message_and_no_orphan(toy, tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "grpo_lightning.train", *toy, *several("ddp", 2), "rollout=hf"]
    command += ["trainer.max_epochs=500", f"hydra.run.dir={folder}"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as parent:
        deadline = time.monotonic() + 120
        while not (folder / "rollouts" / "000002.jsonl").exists():
            assert parent.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        assert len(children) == 2
        os.kill(int(children[1]), signal.SIGKILL)
        message = parent.communicate(timeout=120)[1]
    assert parent.returncode == 1 and "process 1 of 2: ended by signal 9" in message
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert list((folder / "checkpoints").glob("rollout=*.ckpt"))


def test_one_vllm_server_samples_for_all_processes_ahead_of_their_update(toy, tmp_path):
    options = ["model.path=tiny", "model=tiny", *LEARNS[:2], "rollout.prompts=6", "rollout.group_size=4", "kl=none"]
    options += ["eval.prompts=4", "eval.samples=1", "trainer.max_epochs=3", "logger=none", "optimizer.lr=0.001"]
    folder = finish(tmp_path / "run", *options, *several("fsdp", 2), "rollout=vllm_server", "rollout.ahead=1")
    metrics = pd.read_csv(folder / "metrics.csv")
    assert metrics["rollout/staleness_max"].tolist() == [0, 1, 1]
    assert metrics["sampler/logp_gap_max"].max() < 1e-3
    assert [len(records(folder, number)) for number in (1, 2, 3)] == [24] * 3


def test_a_sweep_over_runs_of_two_processes_runs_each_job_once_in_its_folder(toy, tmp_path):
    options = [*toy, "rollout=hf", *several("ddp", 2), "trainer.max_epochs=1", "seed=0,1"]
    done = run("-m", *options, f"hydra.sweep.dir={tmp_path}")
    assert done.returncode == 0, done.stderr[-3000:]
    jobs = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    assert len(jobs) == 2
    for job in jobs:
        assert json.loads((job / "summary.json").read_text())["status"] == "completed"
        assert len(records(job, 1)) == 16 and len(pd.read_csv(job / "metrics.csv")) == 1


def test_adapters_under_fsdp_take_the_same_steps_and_leave_the_reference_alone(toy, tmp_path):
    options = [*toy, *LEARNS, "trainer.max_epochs=2", "kl=k3", "model.lora.r=4"]
    single = finish(tmp_path / "single", *options, "trainer=cpu")
    folder = finish(tmp_path / "several", *options, *several("fsdp", 2))
    assert pd.read_csv(folder / "metrics.csv")["policy/kl"][0] < 1e-6
    for name, values in weights(single).items():
        assert float((weights(folder)[name] - values).abs().max() / values.abs().max()) < 1e-5, name


def test_sharding_halves_what_a_process_holds(tmp_path):
    done = subprocess.run(
        [sys.executable, "scripts/fsdp_memory.py"], cwd=ROOT, capture_output=True, text=True, timeout=900,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "held by each of 2" in done.stdout


def test_the_gpu_check_works_on_a_cpu():
    done = subprocess.run(
        [sys.executable, "scripts/gpu_check.py", "--cpu"], cwd=ROOT, capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("PASS") == 5
