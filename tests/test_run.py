"""The command, end to end, on a toy model: what a run leaves behind, resuming, sweeps, and failures."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lightning.build import build
from grpo_lightning.config import check, compose_checked, normalise
from grpo_lightning.run_folder import RunFolder

ROOT = Path(__file__).parent.parent


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def wandb_records(path: Path) -> list[dict]:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_run_leaves_behind_what_the_readme_says(command, toy, run_dir):
    code, out, _ = command(*toy, "update.minibatches=2", f"hydra.run.dir={run_dir}")
    assert code == 0
    assert "rollouts through hf" in out and "held-out before training" in out and str(run_dir) in out
    rows = read(run_dir / "metrics.csv")
    assert [int(r["step"]) for r in rows] == [1, 2, 3, 4, 5, 6] == [int(r["rollout"]) * 2 - i % 2 for i, r in
                                                                    enumerate(rows, 1)]  # fmt: skip
    # Rollout and validation values stand in the last row of their rollout.
    assert [r["reward/mean"] != "" for r in rows] == [False, True] * 3
    assert [r["val/accuracy"] != "" for r in rows] == [False, False, False, True, False, True]
    for name in (
        "reward/std", "reward/exact/mean", "group/zero_std_fraction", "group/all_right_fraction",
        "group/all_wrong_fraction", "completion/length_mean", "completion/length_wrong",
        "completion/truncated_fraction", "policy/loss", "policy/entropy", "policy/kl", "policy/grad_norm",
        "policy/ratio_max", "clip/low_fraction", "clip/high_fraction", "time/generate_s",
        "speed/generated_tokens_per_s", "speed/trained_tokens_per_s", "val/greedy",
    ):  # fmt: skip
        assert rows[-1][name] != "", name
    records = [jsonl(run_dir / "rollouts" / f"{n:06d}.jsonl") for n in (1, 2, 3)]
    assert [len(r) for r in records] == [16, 16, 16]
    assert {r["weights_version"] for r in records[2]} == {4}
    for n, rollout in enumerate(records):
        scores = [r["reward"] for r in rollout]
        assert float(rows[2 * n + 1]["reward/mean"]) == pytest.approx(sum(scores) / 16)
        for record in rollout:  # the record's own completion gives the record's reward
            numbers = record["completion"].replace("+", " ").split()
            assert record["reward"] == float(bool(numbers) and int(numbers[-1]) == int(record["answer"]))
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["engine"] == "hf" and summary["steps"] == 6
    assert summary["tokens_trained"] == sum(int(r["update/tokens"]) for r in rows) == summary["tokens_generated"]
    greedy = [r["correct"] for r in jsonl(run_dir / "validation" / "000003.jsonl") if r["greedy"]]
    assert summary["val_greedy"] == pytest.approx(sum(greedy) / len(greedy)) and len(greedy) == 8
    assert summary["rollouts"] == 3 and summary["resumed_from_step"] == 0 and summary["seed"] == 0
    assert summary["algorithm"]["advantage"] == "grpo" and summary["algorithm"]["reward"] == "exact"
    assert summary["tokens_generated"] == sum(r["length"] for rollout in records for r in rollout)
    assert summary["val_accuracy"] == pytest.approx(float(rows[-1]["val/accuracy"]))
    parts = [seconds for name, seconds in summary["seconds"].items() if name != "total"]
    assert sum(parts) == pytest.approx(summary["seconds"]["total"]) and summary["peak_rss_gb"] > 0.1
    assert summary["seconds"]["other"] >= 0
    start = [r for r in jsonl(run_dir / "validation" / "000000.jsonl") if not r["greedy"]]
    assert summary["val_accuracy_start"] == pytest.approx(sum(r["correct"] for r in start) / len(start))
    assert len(start) == 16
    policy = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / "model")
    AutoTokenizer.from_pretrained(run_dir / "checkpoints" / "model")
    newest = sorted((run_dir / "checkpoints").glob("*.ckpt"))
    assert [p.name for p in newest] == ["rollout=000002.ckpt", "rollout=000003.ckpt"]  # checkpoint.keep=2
    state = torch.load(newest[-1], weights_only=False)["state_dict"]
    for name, value in policy.state_dict().items():
        assert torch.equal(value, state[f"policy.{name}"])


def test_a_resumed_run_equals_the_run_that_was_never_stopped(command, toy, tmp_path):
    options = [*toy, "algorithm=dapo", "update.minibatches=2", "trainer.max_epochs=4"]
    assert command(*options, f"hydra.run.dir={tmp_path / 'whole'}")[0] == 0
    assert command(*options, f"hydra.run.dir={tmp_path / 'part'}", "trainer.max_epochs=2")[0] == 0
    # What a stopped run wrote beyond its checkpoint is cut and written again.
    with (tmp_path / "part" / "metrics.csv").open("a") as file:
        file.write((tmp_path / "part" / "metrics.csv").read_text().splitlines()[-1].replace("4,2,", "5,3,", 1) + "\n")
    (tmp_path / "part" / "rollouts" / "000003.jsonl").write_text("{}\n")
    code, out, _ = command(f"resume={tmp_path / 'part'}", "trainer.max_epochs=4")
    assert code == 0 and "resuming from" in out
    whole, part = read(tmp_path / "whole" / "metrics.csv"), read(tmp_path / "part" / "metrics.csv")
    assert [r["step"] for r in whole] == [r["step"] for r in part]
    for left, right in zip(whole, part, strict=True):
        for name, value in left.items():
            if not name.startswith(("time/", "speed/", "val/")):  # validation also runs at the end of the first part
                assert right[name] == value, name
    for number in range(1, 5):
        name = f"rollouts/{number:06d}.jsonl"
        assert (tmp_path / "whole" / name).read_text() == (tmp_path / "part" / name).read_text()
    weights = [tmp_path / run / "checkpoints" / "model" / "model.safetensors" for run in ("whole", "part")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    summary = json.loads((tmp_path / "part" / "summary.json").read_text())
    assert summary["resumed_from_step"] == 4 and summary["steps"] == 8


def test_a_mistake_in_resuming_changes_nothing_and_a_finished_run_stays(command, toy, run_dir):
    assert command(*toy, "trainer.max_epochs=2", f"hydra.run.dir={run_dir}")[0] == 0
    before = {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file() and p.name != "train.log"}
    for wrong in ("model.path=./nowhere", "seed=7", "clip.epsilon=2", "kl=none", "eval.samples=3"):
        code, _, err = command(f"resume={run_dir}", "trainer.max_epochs=4", wrong)
        assert code == 2 and err.count("grpo_lightning:") == 1, err
    assert command(*toy, "seed=5", f"hydra.run.dir={run_dir}")[0] == 2
    code, _, err = command(f"resume={run_dir}")
    assert code == 0 and "nothing to do" in err
    assert {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file() and p.name != "train.log"} == before
    # The options given when resuming count, also those that a checkpoint carries along, and are remembered.
    assert command(f"resume={run_dir}", "trainer.max_epochs=3", "optimizer.lr=0.0007")[0] == 0
    assert [float(r["optimizer/lr"]) for r in read(run_dir / "metrics.csv")] == [0.003, 0.003, 0.0007]
    assert command(f"resume={run_dir}", "trainer.max_epochs=4")[0] == 0
    assert float(read(run_dir / "metrics.csv")[-1]["optimizer/lr"]) == 0.0007
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["rollouts"] == 4 and summary["seconds"]["generate"] > 0


def test_a_damaged_checkpoint_falls_back_to_the_one_before(command, toy, run_dir):
    assert command(*toy, f"hydra.run.dir={run_dir}")[0] == 0
    newest = run_dir / "checkpoints" / "rollout=000003.ckpt"
    newest.write_bytes(newest.read_bytes()[:1000])
    (run_dir / "summary.json").unlink()
    before = read(run_dir / "metrics.csv")
    code, out, err = command(f"resume={run_dir}")
    assert code == 0 and "rollout=000003.ckpt cannot be read" in out + err
    assert json.loads((run_dir / "summary.json").read_text())["resumed_from_step"] == 2
    assert [r["reward/mean"] for r in read(run_dir / "metrics.csv")] == [r["reward/mean"] for r in before]


def test_sampler_and_trainer_agree_at_another_temperature_and_after_updates(command, toy, run_dir):
    options = ["rollout.temperature=0.6", "update.minibatches=2", "reward=[random]", "eval.reward=exact"]
    code, _, err = command(*toy, *options, f"hydra.run.dir={run_dir}")
    assert code == 0, err
    rows = read(run_dir / "metrics.csv")
    assert max(float(r["sampler/logp_gap_max"]) for r in rows) < 1e-4
    # The first step of a rollout is on the policy that sampled; the second is not.
    assert all(float(r["policy/ratio_max"]) < 1.0001 for r in rows[::2])
    assert any(float(r["policy/ratio_max"]) > 1.0001 for r in rows[1::2])


def test_every_option_of_the_configuration_reaches_its_place(toy, tmp_path):
    options = [
        "update.epochs=2", "update.micro_batch_tokens=77", "optimizer.warmup_rollouts=3", "optimizer.max_grad_norm=0.5",
        "seed=11", "rollout.temperature=0.9", "rollout.max_new_tokens=5",
    ]  # fmt: skip
    cfg = compose_checked(normalise([*toy, *options]))
    run = build(cfg, check(cfg), RunFolder(tmp_path), [])
    module, collector = run.module, run.rollouts.collector
    assert (module.temperature, module.micro_batch_tokens, module.max_grad_norm) == (0.9, 77, 0.5)
    assert module.warmup_rollouts == 3 and len(module.buffer) == 2 and module.buffer.seed == 11
    assert collector.needs_old_logp and collector.seed == 11 and collector.sampling.max_new_tokens == 5
    assert (collector.sampling.temperature, collector.sampling.eos_token_ids) == (0.9, (2,))
    assert run.evaluation.run_evaluation.keywords == {"samples": 2, "seed": 11}
    assert len(run.evaluation.run_evaluation.args[1]) == 8 and run.trainer.max_epochs == 3
    run.close()


def test_a_folder_that_holds_a_run_is_not_overwritten(command, toy, run_dir):
    assert command(*toy, "trainer.max_epochs=1", f"hydra.run.dir={run_dir}")[0] == 0
    before = (run_dir / "summary.json").read_text()
    code, _, err = command(*toy, "trainer.max_epochs=1", f"hydra.run.dir={run_dir}")
    assert code == 2 and "already holds a run" in err and "resume=auto" in err
    assert (run_dir / "summary.json").read_text() == before


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "dr_grpo", "gspo", "rloo"])
def test_every_preset_trains(algorithm, command, toy, run_dir):
    code, _, err = command(*toy, f"algorithm={algorithm}", "update.minibatches=2", f"hydra.run.dir={run_dir}")
    assert code == 0, err
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["algorithm"]["algorithm"] == algorithm and summary["steps"] >= 2
    assert ("policy/kl" in read(run_dir / "metrics.csv")[0]) == (algorithm == "grpo")


def test_parts_are_exchanged_one_by_one(command, toy, run_dir):
    code, _, err = command(*toy, "advantage=dr_grpo", "clip=higher", "trainer.max_epochs=1", f"hydra.run.dir={run_dir}")
    assert code == 0, err
    chosen = json.loads((run_dir / "summary.json").read_text())["algorithm"]
    assert (chosen["advantage"], chosen["clip"], chosen["kl"]) == ("dr_grpo", "higher", "k3")


def test_bfloat16_and_a_users_own_callback_that_monitors(command, toy, run_dir):
    # P77: the held-out accuracy can be monitored. bf16-mixed keeps float32 weights.
    code, _, err = command(
        *toy, "trainer.precision=bf16-mixed", "callbacks=default", f"hydra.run.dir={run_dir}",
        "+callbacks.best._target_=lightning.pytorch.callbacks.ModelCheckpoint", "+callbacks.best.monitor=val/accuracy",
        f"+callbacks.best.dirpath={run_dir / 'best'}", "+callbacks.best.mode=max",
    )  # fmt: skip
    assert code == 0, err
    assert len(list((run_dir / "best").glob("*.ckpt"))) == 1
    state = torch.load(run_dir / "checkpoints" / "rollout=000003.ckpt", weights_only=False)
    assert {v.dtype for v in state["state_dict"].values()} == {torch.float32}
    first = read(run_dir / "metrics.csv")[0]
    assert float(first["policy/kl"]) < 1e-3 and float(first["policy/ratio_max"]) == 1.0


def test_trainer_options_that_lightning_refuses_are_one_line(command, toy, run_dir):
    code, _, err = command(*toy, "+trainer.no_such_thing=1", f"hydra.run.dir={run_dir}")
    assert code == 2 and "no_such_thing" in err and "Traceback" not in err


def test_a_rollout_without_varied_groups_takes_no_step_and_is_recorded(command, toy, run_dir):
    code, out, _ = command(
        *toy, "sampling=dynamic", "sampling.max_draws=1", "reward=[format]", "reward.format.pattern='x+'",
        "trainer.max_epochs=2", f"hydra.run.dir={run_dir}", "eval.reward=exact",
    )  # fmt: skip
    summary = json.loads((run_dir / "summary.json").read_text())
    assert code == 0 and summary["status"] == "completed"
    assert summary["steps"] == 0 and summary["rollouts_without_step"] == 2 and "no optimiser step" in out
    assert len(jsonl(run_dir / "rollouts" / "000002.jsonl")) == 16
    assert not (run_dir / "metrics.csv").exists()


def test_the_training_reward_and_the_checker_of_validation_may_differ(command, toy, run_dir):
    # P71: a placebo in training; validation by exact answers is untouched by it.
    code, out, _ = command(*toy, "reward=[random]", "reward.random.rate=0.5", f"hydra.run.dir={run_dir}")
    assert code == 0 and "validated by exact" in out
    row = read(run_dir / "metrics.csv")[-1]
    assert 0.1 < float(row["reward/random/mean"]) < 0.9 and float(row["val/accuracy"]) < 0.5


def test_validation_leaves_training_as_it_is(command, toy, tmp_path):
    # P71: with and without validations in between, and with another checker, training gives the same numbers.
    for name, options in (
        ("often", ["eval.every=1", "eval.reward=exact"]),
        ("seldom", ["eval.every=3", "eval.reward=math"]),
    ):
        assert command(*toy, "reward=[random]", *options, f"hydra.run.dir={tmp_path / name}")[0] == 0
    often, seldom = (read(tmp_path / name / "metrics.csv") for name in ("often", "seldom"))
    for left, right in zip(often, seldom, strict=True):
        assert {k: v for k, v in left.items() if not k.startswith(("val/", "time/", "speed/"))} == {
            k: v for k, v in right.items() if not k.startswith(("val/", "time/", "speed/"))
        }


def test_a_reward_that_raises_ends_the_run_and_keeps_what_was(command, toy, run_dir, tmp_path, monkeypatch):
    (tmp_path / "broken_reward.py").write_text(
        "calls = 0\n"
        "def score(prompts, completions, **columns):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls > 2:\n"
        "        raise KeyError('gold')\n"
        "    return [float(len(c)) for c in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    code, _, err = command(
        *toy, "reward=[function]", "reward.function.path=broken_reward.score", "eval.reward=exact",
        f"hydra.run.dir={run_dir}",
    )  # fmt: skip
    assert code == 1
    assert "reward.function" in err and "KeyError" in err and "row 0" in err and "Traceback" not in err
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "failed" and "KeyError" in summary["message"] and summary["steps"] == 2
    assert len(read(run_dir / "metrics.csv")) == 2 and len(list((run_dir / "rollouts").iterdir())) == 2
    assert (run_dir / "checkpoints" / "rollout=000002.ckpt").exists()


def test_a_sweep_runs_each_job_in_its_own_folder_and_once(toy, tmp_path):
    def sweep(*extra: str) -> subprocess.CompletedProcess[str]:
        arguments = ["-m", *toy, "trainer.max_epochs=1", f"hydra.sweep.dir={tmp_path / 'sweep'}", *extra]
        arguments = [a for a in arguments if a != "logger=none"] + ["logger=wandb"]
        return subprocess.run(
            [sys.executable, str(ROOT / "train.py"), *arguments, "advantage=grpo,dr_grpo", "seed=0,1"],
            cwd=tmp_path, capture_output=True, text=True, timeout=300,
        )  # fmt: skip

    first = sweep()
    assert first.returncode == 0, first.stderr
    jobs = sorted(p for p in (tmp_path / "sweep").iterdir() if p.is_dir())
    assert len(jobs) == 4
    for job in jobs:
        summary = json.loads((job / "summary.json").read_text())
        config = (job / "config.yaml").read_text()
        assert summary["status"] == "completed" and f"seed: {summary['seed']}" in config
        assert f"advantage={summary['algorithm']['advantage']}" in job.name and "sweep: sweep" in config
        [offline] = (job / "wandb").glob("offline-run-*/*.wandb")
        records = wandb_records(offline)
        # Grouped by the sweep, and every curve is drawn over optimiser steps.
        assert [r["run"]["run_group"] for r in records if r["type"] == "run"] == ["sweep"]
        axes = {m["metric"].get("glob_name"): m["metric"].get("step_metric") for m in records if m["type"] == "metric"}
        assert axes["*"] == "trainer/global_step"
        history = [r["history"]["item"] for r in records if r["type"] == "history"]
        logged = [h for h in history if "reward/mean" in h]
        assert [h["trainer/global_step"] for h in logged] == [1] and "val/accuracy" in logged[0]
        assert any("rollouts/completions._type" in h for h in history)
    # The first rollout's completions depend on the seed, and not on the advantage.
    assert len({str([r["completion"] for r in jsonl(job / "rollouts" / "000001.jsonl")]) for job in jobs}) == 2
    (jobs[1] / "summary.json").unlink()  # as if it had been killed
    stamps = {job: (job / "metrics.csv").stat().st_mtime_ns for job in jobs}
    second = sweep()
    assert second.returncode == 0 and second.stdout.count("completed before, skipped") == 3
    assert json.loads((jobs[1] / "summary.json").read_text())["status"] == "completed"
    assert all((job / "metrics.csv").stat().st_mtime_ns == stamps[job] for job in jobs if job != jobs[1])
