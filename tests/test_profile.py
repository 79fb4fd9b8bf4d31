"""PhaseClock adds up, and profile=true says where the time went."""

import gzip
import json
import time

import pytest

from grpo_lightning import run_folder as folders
from grpo_lightning.clock import PhaseClock
from grpo_lightning.module import GRPOModule
from tests.whole_run import send, step


def test_the_seconds_of_an_inner_phase_are_not_those_of_the_outer_one():
    clock, seen = PhaseClock(), []
    clock.on_change = seen.append
    started = time.perf_counter()
    with clock("score"):
        time.sleep(0.02)
        with clock("logps"):
            time.sleep(0.05)
            with clock("sync"):
                time.sleep(0.01)
        assert clock.phase == "score"
    took = time.perf_counter() - started
    assert clock.phase == "start" and seen == ["score", "logps", "sync"]
    assert 0.02 <= clock.total["score"] < 0.045 and 0.05 <= clock.total["logps"] < 0.075
    assert sum(clock.total.values()) == pytest.approx(took, abs=5e-3)
    assert clock.lap() == clock.total and clock.lap() == {}


def test_a_part_counts_within_its_phase_and_an_error_does_not_lose_it():
    clock = PhaseClock()
    with pytest.raises(ValueError), clock("update"):
        for _ in range(2):
            with clock.part("forward"):
                assert clock.phase == "update"
                time.sleep(0.01)
        with clock.part("backward"):
            time.sleep(0.01)
            raise ValueError
    assert set(clock.total) == {"update"} and clock.total["update"] >= 0.03
    assert 0.02 <= clock.parts["forward"] < 0.03 > clock.parts["backward"] >= 0.01
    assert sum(clock.parts.values()) <= clock.total["update"]


@pytest.fixture
def with_parts(monkeypatch):
    """Has the module time its forward pass as a part."""
    forward = GRPOModule._backward

    def timed(self, *arguments):
        with self.clock.part("forward"):
            return forward(self, *arguments)

    monkeypatch.setattr(GRPOModule, "_backward", timed)


def test_a_profiled_run_says_where_the_time_went_and_traces_its_second_rollout(command, toy, run_dir, with_parts):
    code, out, _ = command(*toy, "profile=true", f"hydra.run.dir={run_dir}")
    assert code == 0 and "where the time went" in out
    summary = json.loads((run_dir / "summary.json").read_text())
    profile, seconds = summary["profile"], summary["seconds"]
    phases = profile["phases"]
    of_update = {"forward", "backward", "optimizer", "rest of update"}
    whole = {name: figures for name, figures in phases.items() if name not in of_update}
    assert set(whole) == {"generate", "score", "logps", "update", "sync", "validate", "checkpoint", "other"}
    assert sum(figures["seconds"] for figures in whole.values()) == pytest.approx(profile["seconds"])
    assert sum(figures["share"] for figures in whole.values()) == pytest.approx(1)
    assert sum(phases[name]["seconds"] for name in of_update) == pytest.approx(phases["update"]["seconds"])
    assert phases["forward"]["seconds"] > 0.5 * phases["update"]["seconds"]
    for name in set(whole) - {"other"}:
        assert phases[name]["seconds"] == pytest.approx(seconds[name])
    assert phases["generate"]["tokens_per_s"] == pytest.approx(summary["tokens_generated"] / seconds["generate"])
    assert phases["update"]["tokens_per_s"] == pytest.approx(summary["tokens_trained"] / seconds["update"])
    assert profile["traced_rollout"] == 2
    [trace] = (run_dir / "profile").iterdir()
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    assert trace.name == "trace.json" and {"aten::mm", "generate", "update", "forward"} <= set(names)
    assert names.count("update") == 1 and "validate" not in names  # one step of one rollout
    text = (run_dir / "profile.md").read_text()
    assert "# Rollout 2" in text and "| aten::mm |" in text and "| &emsp;forward |" in text


def test_a_large_trace_is_packed(command, toy, run_dir, monkeypatch):
    monkeypatch.setattr(folders, "LARGE_TRACE", 1000)
    assert command(*toy, "profile=true", "trainer.max_epochs=1", f"hydra.run.dir={run_dir}")[0] == 0
    assert [p.name for p in (run_dir / "profile").iterdir()] == ["trace.json.gz"]
    with gzip.open(run_dir / "profile" / "trace.json.gz") as file:
        assert json.load(file)["traceEvents"]


def test_an_interrupted_run_is_told_of_too_and_a_resumed_one_may_be_profiled(command, toy, run_dir, at):
    at(GRPOModule, "training_step", step(2, 0), send)
    code, out, _ = command(*toy, "profile=true", f"hydra.run.dir={run_dir}")
    assert code == 130 and "where the time went" in out
    assert json.loads((run_dir / "summary.json").read_text())["profile"]["phases"]["update"]["seconds"] > 0
    before = json.loads((run_dir / "summary.json").read_text())["seconds"]["update"]
    assert command(f"resume={run_dir}", "profile=false", "trainer.max_epochs=3")[0] == 0
    assert "profile" not in json.loads((run_dir / "summary.json").read_text())
    assert command(f"resume={run_dir}", "profile=true", "trainer.max_epochs=4")[0] == 0
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["profile"]["traced_rollout"] == 4
    # Of this process alone: one of the four rollouts.
    assert summary["profile"]["phases"]["update"]["seconds"] < summary["seconds"]["update"] - before / 2


def test_profile_is_true_or_false(command, toy, run_dir):
    code, _, err = command(*toy, "profile=maybe", f"hydra.run.dir={run_dir}")
    assert code == 2 and "profile must be true or false, got maybe" in err


def test_without_it_nothing_is_traced(command, toy, run_dir, monkeypatch):
    monkeypatch.setattr("grpo_lightning.callbacks.profile.profile", None)
    assert command(*toy, "trainer.max_epochs=2", f"hydra.run.dir={run_dir}")[0] == 0
    assert not (run_dir / "profile").exists() and not (run_dir / "profile.md").exists()
