"""What a checkpoint holds, and what happens when a disk is full or a file damaged."""

import errno
import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch

from grpo_lightning import build as build_module
from grpo_lightning.module import GRPOModule
from tests.models import llama
from tests.whole_run import OPTIONS, read, send, step


def test_what_a_checkpoint_holds(command, toy, run_dir):
    assert command(*toy, "trainer.max_epochs=1", "logger=wandb", f"hydra.run.dir={run_dir}")[0] == 0
    state = torch.load(run_dir / "checkpoints" / "rollout=000001.ckpt", weights_only=False)
    assert {name.partition(".")[0] for name in state["state_dict"]} == {"policy"}  # never the reference
    assert len(state["optimizer_states"]) == 1 and state["global_step"] == 1 and state["config"]["seed"] == 0
    assert state["callbacks"]["RolloutCallback"]["collector"]["stream"]["position"] == 4
    [rng] = state["callbacks"]["RandomStates"]["ranks"]
    assert {"python", "numpy", "torch"} <= rng.keys()
    name = (run_dir / "wandb_id.txt").read_text().strip()
    assert command(f"resume={run_dir}", "trainer.max_epochs=2")[0] == 0
    runs = [p for p in (run_dir / "wandb").iterdir() if p.name.startswith("offline-run-")]
    assert len(runs) == 2 and all(p.name.endswith(f"-{name}") for p in runs)


def test_the_best_by_validation_is_kept_beside_the_newest(command, toy, run_dir, at):
    # Of these four validations, made up, the second is the best; the run is stopped after the third.
    values = iter([0.1, 0.2, 0.9, 0.5, 0.9])
    options = ["eval.every=1", "trainer.max_epochs=4", "checkpoint.best=val/accuracy", "checkpoint.keep=1"]
    with pytest.MonkeyPatch.context() as patch:
        evaluate = build_module.evaluate

        def made_up(*arguments, **others):
            result = evaluate(*arguments, **others)
            result.metrics["val/accuracy"] = next(values)
            return result

        patch.setattr(build_module, "evaluate", made_up)
        at(GRPOModule, "training_step", step(3, 0), send)
        assert command(*toy, *options, f"hydra.run.dir={run_dir}")[0] == 130
        assert json.loads((run_dir / "checkpoints" / "best.json").read_text()) == {"rollout": 2, "val/accuracy": 0.9}
        best = torch.load(run_dir / "checkpoints" / "best.ckpt", weights_only=False)
        assert command(f"resume={run_dir}")[0] == 0
    assert best["global_step"] == 2
    again = torch.load(run_dir / "checkpoints" / "best.ckpt", weights_only=False)
    assert again["global_step"] == 2  # an equal value later does not replace it
    names = {p.name for p in (run_dir / "checkpoints").iterdir()}
    assert names == {"best.ckpt", "best.json", "rollout=000004.ckpt", "model"}


def test_a_best_of_rollouts_that_are_done_again_is_not_held_against_them(command, toy, run_dir):
    options = ["eval.every=1", "checkpoint.best=val/accuracy", "trainer.max_epochs=1"]
    assert command(*toy, *options, f"hydra.run.dir={run_dir}")[0] == 0
    best = run_dir / "checkpoints" / "best.json"
    best.write_text(json.dumps({"rollout": 2, "val/accuracy": 2.0}))  # of a rollout after the newest checkpoint
    assert command(f"resume={run_dir}", "trainer.max_epochs=2")[0] == 0
    assert json.loads(best.read_text())["val/accuracy"] <= 1
    code, _, err = command(*toy, "checkpoint.best=val/length", f"hydra.run.dir={run_dir}2")
    assert code == 2 and "checkpoint.best must be null or one of val/accuracy, val/greedy, val/pass@2" in err


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "train.log"
    }


@pytest.fixture
def full_disk(monkeypatch):
    """Makes the disk full for files of a name: what is written is cut off."""

    def fill(ending):
        original = os.fsync

        def fsync(descriptor):
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith(ending):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - 1)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            original(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)

    return fill


@pytest.mark.parametrize(
    ("ending", "named"),
    [
        ("rollout=000002.ckpt.part", "checkpoints/rollout=000002.ckpt"),
        ("metrics.csv", "metrics.csv"),
        ("000002.jsonl.part", "rollouts/000002.jsonl"),
    ],
)
def test_a_full_disk_is_one_line_and_nothing_is_overwritten(ending, named, command, toy, run_dir, full_disk):
    assert command(*toy, "trainer.max_epochs=1", "checkpoint.keep=1", f"hydra.run.dir={run_dir}")[0] == 0
    before = contents(run_dir)
    full_disk(ending)
    code, _, err = command(f"resume={run_dir}", "trainer.max_epochs=3")
    assert code == 1 and len(err.strip().splitlines()) == 1 and "Traceback" not in err
    assert f"{run_dir / named} could not be written (No space left on device)" in err
    after = contents(run_dir)
    assert after["checkpoints/rollout=000001.ckpt"] == before["checkpoints/rollout=000001.ckpt"]
    assert after["rollouts/000001.jsonl"] == before["rollouts/000001.jsonl"]
    assert after["metrics.csv"].startswith(before["metrics.csv"]) and after["metrics.csv"].endswith(b"\n")
    assert len({line.count(b",") for line in after["metrics.csv"].splitlines()}) == 1  # no half row
    assert not [name for name in after if name.endswith(".part")] and "traceback.txt" not in after
    assert json.loads(after["summary.json"])["status"] == "failed"


def test_after_a_checkpoint_that_could_not_be_written_the_older_one_is_gone_on_from(command, toy, run_dir, whole):
    run = [*toy, *OPTIONS, "checkpoint.every=1", "checkpoint.keep=1"]
    assert command(*run, "trainer.max_epochs=1", "eval.every=10", f"hydra.run.dir={run_dir}")[0] == 0
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        code, _, err = command(f"resume={run_dir}", "trainer.max_epochs=4", "eval.every=2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1 and len(err.strip().splitlines()) == 1, err
    assert "rollout=000002.ckpt could not be written (File too large)" in err
    assert [p.name for p in (run_dir / "checkpoints").glob("*ckpt*")] == ["rollout=000001.ckpt"]
    assert command(f"resume={run_dir}", "trainer.max_epochs=4")[0] == 0
    assert [r["policy/loss"] for r in read(whole / "metrics.csv")] == [
        r["policy/loss"] for r in read(run_dir / "metrics.csv")
    ]


def test_a_folder_that_cannot_be_written_is_one_line(command, toy, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = command(*toy, f"hydra.run.dir={tmp_path / 'file' / 'run'}")
    assert code == 2 and len(err.strip().splitlines()) == 1
    assert f"hydra.run.dir={tmp_path / 'file' / 'run'} cannot be written: {tmp_path / 'file'}" in err


def test_what_a_kill_left_half_written_is_removed_when_the_run_goes_on(command, toy, run_dir):
    assert command(*toy, "trainer.max_epochs=1", f"hydra.run.dir={run_dir}")[0] == 0
    # Of rollouts that this shorter run will not come to, so that nothing else removes them.
    leftovers = ["checkpoints/rollout=000007.ckpt.part", "rollouts/000007.jsonl.part", "validation/000007.jsonl.part"]
    for name in leftovers:
        (run_dir / name).write_text("{")
    (run_dir / "checkpoints" / "model.part").mkdir()
    assert command(f"resume={run_dir}", "trainer.max_epochs=2")[0] == 0
    assert not list(run_dir.rglob("*.part"))


def test_where_no_checkpoint_can_be_read_the_run_says_so_and_stays_as_it_is(command, toy, run_dir):
    assert command(*toy, f"hydra.run.dir={run_dir}")[0] == 0
    checkpoints = sorted((run_dir / "checkpoints").glob("*.ckpt"))
    for path in checkpoints:
        path.write_bytes(path.read_bytes()[:-5000])
    before = contents(run_dir)
    code, out, err = command(f"resume={run_dir}", "trainer.max_epochs=5")
    assert code == 1 and "no checkpoint in" in err and "put back a whole one" in err and "Traceback" not in err
    assert all(f"{path} cannot be read" in out for path in checkpoints)
    assert contents(run_dir) == before


def test_the_last_whole_checkpoint_outlives_a_damaged_newer_one(command, toy, run_dir, at):
    assert command(*toy, f"hydra.run.dir={run_dir}")[0] == 0
    newest = run_dir / "checkpoints" / "rollout=000003.ckpt"
    newest.write_bytes(newest.read_bytes()[:1000])
    newest.rename(run_dir / "checkpoints" / "rollout=000005.ckpt")
    seen = []
    at(GRPOModule, "training_step", step(5, 0), lambda: seen.extend((run_dir / "checkpoints").glob("*.ckpt")))
    assert command(f"resume={run_dir}", "trainer.max_epochs=6", "checkpoint.keep=1", "checkpoint.every=4")[0] == 0
    assert [p.name for p in seen] == ["rollout=000004.ckpt"]
    names = {p.name for p in (run_dir / "checkpoints").glob("*ckpt*")}
    assert names == {"rollout=000006.ckpt", "rollout=000005.ckpt.damaged"}


def test_a_checkpoint_of_another_model_or_configuration_is_named(command, toy, run_dir, tmp_path):
    one = [*toy, "trainer.max_epochs=1"]
    assert command(*one, f"hydra.run.dir={run_dir}")[0] == 0
    assert command(*one, "clip.epsilon=0.3", f"hydra.run.dir={tmp_path / 'clip'}")[0] == 0
    name = "checkpoints/rollout=000001.ckpt"
    original = (run_dir / name).read_bytes()
    shutil.copy(tmp_path / "clip" / name, run_dir / name)
    before = contents(run_dir)
    code, _, err = command(f"resume={run_dir}", "trainer.max_epochs=2")
    assert code == 2 and len(err.strip().splitlines()) == 1 and "clip.epsilon differs from the run in" in err
    assert contents(run_dir) == before
    (run_dir / name).write_bytes(original)
    model = Path(next(o for o in toy if o.startswith("model.path=")).partition("=")[2])
    shutil.copytree(model, tmp_path / "kept")
    try:
        llama(0, hidden_size=16).save_pretrained(model)  # under the same name
        before = contents(run_dir)
        code, _, err = command(f"resume={run_dir}", "trainer.max_epochs=2")
    finally:
        shutil.rmtree(model)
        shutil.copytree(tmp_path / "kept", model)
    assert code == 2 and len(err.strip().splitlines()) == 1 and "Traceback" not in err
    assert "policy.model.embed_tokens.weight is [11, 32] there and [11, 16] in this one" in err
    assert contents(run_dir) == before


def test_fewer_rollouts_than_there_are_is_one_line(command, toy, run_dir, at):
    at(GRPOModule, "training_step", step(2, 0), send)
    assert command(*toy, f"hydra.run.dir={run_dir}")[0] == 130
    code, _, err = command(f"resume={run_dir}", "trainer.max_epochs=1")
    assert code == 2 and "trainer.max_epochs=1" in err and "has 2 rollouts" in err
