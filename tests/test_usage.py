"""Wrong usage: one line that says what is wrong, where, and what would be right; exit code 2."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from grpo_lightning import config, sweep
from grpo_lightning.config import (
    compose_checked,
    folder_name,
    job_name,
    normalise,
    quote,
    register_resolvers,
    sweep_points,
)
from grpo_lightning.errors import UsageError
from grpo_lightning.objective.load import conf_dir

WRONG = [
    ("advantage=grppo", ["advantage=grppo", "did you mean grpo?", "dr_grpo"]),
    ("clip=hihger", ["clip=hihger", "did you mean higher?"]),
    ("clipping=higher", ["clipping", "the group is called clip"]),
    ("clip.epsilom=0.3", ["clip.epsilom", "did you mean clip.epsilon?"]),
    ("clip=higher clip.epsilon=0.3", ["clip.epsilon", "belongs to clip=symmetric"]),
    ("kl=none kl.beta=0.1", ["kl.beta", "kl=k1"]),
    ("lr=1e-3", ["lr", "optimizer.lr"]),
    ("eval.promts=3", ["eval.promts", "did you mean eval.prompts?"]),
    ("rollouts.prompts=3", ["did you mean rollout.prompts?"]),
    ("reward=[exakt]", ["reward=exakt", "did you mean exact?"]),
    ("+foo=1", ["foo: no such option"]),
    ("+rollout.foo=1", ["rollout.foo: no such option"]),
    ("rollout.top_p=0.9", ["rollout.top_p", "full softmax"]),
    ("rollout.group_size=1", ["rollout.group_size must be at least 2", "advantage=grpo"]),
    ("rollout.prompts=abc", ["rollout.prompts", "abc"]),
    ("rollout.prompts=0", ["rollout.prompts", "at least 1"]),
    ("rollout.prompts=4 update.minibatches=8", ["update.minibatches=8", "rollout.prompts=4"]),
    ("rollout.temperature=0", ["rollout.temperature", "above 0"]),
    ("clip.epsilon=abc", ["clip.epsilon", "'abc'"]),
    ("clip.epsilon=2", ["clip.epsilon", "(0, 1)"]),
    ("clip.epsilon=[0.1", ["clip.epsilon=[0.1"]),
    ("optimizer.lr=abc", ["optimizer.lr", "abc"]),
    ("optimizer.max_grad_norm=0", ["optimizer.max_grad_norm", "null"]),
    ("seed=-1", ["seed", "-1"]),
    ("+trainer.gradient_clip_val=1.0", ["trainer.gradient_clip_val", "optimizer.max_grad_norm"]),
    ("update.skip_silent=2", ["update.skip_silent must be none, backward or all, got 2"]),
    ("update.share_prompts=maybe", ["update.share_prompts"]),
    ("trainer.accumulate_grad_batches=2", ["trainer.accumulate_grad_batches", "update.micro_batch_tokens"]),
    ("trainer.precision=bf16-true", ["trainer.precision=bf16-true", "bf16-mixed"]),
    ("trainer.devices=2", ["2 devices", "trainer=ddp"]),
    ("model=hf", ["model.path is missing"]),
    ("data=file", ["data.path is missing"]),
    ("resume=auto", ["resume=auto", "hydra.run.dir"]),
    ("ratio=sequence clip=none", ["ratio=sequence", "clip=none"]),
    ("ratio=sequence advantage=reinforce_pp advantage.gamma=0.9", ["ratio=sequence", "advantage=reinforce_pp"]),
]


@pytest.mark.parametrize("line,expected", WRONG, ids=[line for line, _ in WRONG])
def test_wrong_options_are_one_line_that_says_what_would_be_right(line, expected):
    with pytest.raises(UsageError) as caught:
        compose_checked(normalise(line.split()))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 300
    for part in expected:
        assert part in message, message


GROUPS = (
    "advantage ratio clip kl loss_norm overlong sampling correction entropy reward algorithm experiment model data "
    "rollout trainer logger callbacks"
)


@pytest.mark.parametrize("group", GROUPS.split())
def test_every_option_composes(group):
    for path in sorted((conf_dir() / group).glob("*.yaml")):
        choice = f"[{path.stem}]" if group == "reward" else path.stem
        needed = (
            {"hf": ["model.path=a/b"], "file": ["data.path=a.jsonl"]}.get(path.stem, []) if group != "rollout" else []
        )
        if (group, path.stem) == ("ratio", "sequence"):
            needed = ["kl=none"]
        cfg = compose_checked([f"{group}={choice}", *needed])
        assert OmegaConf.to_container(cfg, resolve=False)


def test_a_choice_on_the_command_line_beats_preset_and_experiment():
    # P80: every pair of options gives the classes asked for, whatever the preset chose.
    pairs = [("sequence", "symmetric"), ("token", "higher"), ("prompt", "dual"), ("constant", "two_sided")]
    for norm, clip in pairs:
        alone = config.compose("train", ["algorithm=rloo", f"loss_norm={norm}", f"clip={clip}"])
        assert norm.split("_")[0] in alone.loss_norm._target_.lower()
        for preset in ("grpo", "dapo", "dr_grpo", "gspo"):
            cfg = config.compose("train", [f"algorithm={preset}", f"loss_norm={norm}", f"clip={clip}"])
            assert (cfg.loss_norm, cfg.clip) == (alone.loss_norm, alone.clip)
    cfg = compose_checked(["experiment=dapo_paper", "clip=symmetric", "model=hf", "model.path=a/b"])
    assert "epsilon" in cfg.clip and cfg.sampling.max_draws > 1


@pytest.mark.parametrize("path", sorted((conf_dir() / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_value_of_an_experiment_reaches_the_configuration(path):
    cfg = config.compose("train", [f"experiment={path.stem}"])
    values = {k: v for k, v in OmegaConf.load(path).items() if k != "defaults"}
    assert values
    merged = OmegaConf.merge(cfg, values)
    assert OmegaConf.to_container(merged) == OmegaConf.to_container(cfg)


def test_short_forms_say_the_same_as_the_long_ones():
    assert normalise(["data.path=x.jsonl"]) == ["data.path=x.jsonl", "data=file"]
    assert normalise(["data.path=x.jsonl", "data=gsm8k"]) == ["data.path=x.jsonl", "data=gsm8k"]
    assert normalise(["-m", "model.path=a/b"]) == ["-m", "model.path=a/b", "model=hf"]
    assert normalise(["eval.reward=[math]"]) == ["reward@eval.reward=[math]"]
    assert "math" in compose_checked(normalise(["eval.reward=math"])).eval.reward
    with pytest.raises(UsageError, match="no run to go on with there"):
        normalise(["resume=nowhere"])


def test_sweeps_are_expanded_and_named():
    points = sweep_points(["algorithm=grpo,dapo", "seed=0,1", "optimizer.lr=1e-4"])
    assert len(points) == 4 and points[0] == ["algorithm=grpo", "seed=0", "optimizer.lr=1e-4"]
    assert folder_name("algorithm=grpo,seed=0") == "algorithm=grpo,seed=0"
    long = folder_name("data.path=/a/b c," * 20)
    assert len(long) <= 100 and not set(long) - set("abcdefghijklmnopqrstuvwxyz.=_,0123456789")
    assert folder_name("a/b") != folder_name("a_b")


def test_a_job_is_named_by_what_is_swept(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "algorithm=grpo,dapo", "data.path=/x/y", "seed=0,1"])
    register_resolvers()
    # A launcher may ask in a process of its own, as submitit does on another machine.
    monkeypatch.setattr(sys, "argv", ["submitit", "/shared/.submitit/%j"])
    assert job_name("algorithm=grpo,data.path=/x/y,seed=0") == "algorithm=grpo,seed=0"


def test_what_a_launcher_keeps_in_the_sweep_folder_is_no_job(tmp_path, capsys):
    for name in (".submitit", "seed=0"):
        (tmp_path / name).mkdir()
    (tmp_path / "seed=0" / "summary.json").write_text('{"status": "completed"}')
    config = SimpleNamespace(hydra=SimpleNamespace(sweep=SimpleNamespace(dir=str(tmp_path))))
    sweep.SweepTable().on_multirun_end(config)
    out = capsys.readouterr().out
    assert "seed=0" in out and "submitit" not in out and sweep.SweepTable.failed == 0


def test_a_completed_job_is_skipped_and_its_metric_returned_to_the_sweeper(monkeypatch, tmp_path, capsys):
    job = SimpleNamespace(num=3, override_dirname="seed=[/x]")  # brackets are text, not markup
    hydra = SimpleNamespace(runtime=SimpleNamespace(output_dir=str(tmp_path)), job=job)
    monkeypatch.setattr(sweep, "HydraConfig", SimpleNamespace(get=lambda: hydra))
    (tmp_path / "summary.json").write_text('{"status": "completed", "val_accuracy": 0.75}')
    assert sweep.run_child() == 0.75
    assert "seed=[/x]: completed before, skipped" in capsys.readouterr().out


def test_any_path_survives_quoting():
    for path in ("/a/b=c,d/e", "/it's/here", "/back\\slash"):
        cfg = config.compose("train", [f"sweep={quote(path)}"])
        assert cfg.sweep == path


def test_wrong_input_files_end_the_run_before_the_model_is_loaded(command, toy, tmp_path):
    good = [o for o in toy if not o.startswith("data.")]
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"q": "1+1", "a": 2}\n{"q": "1+2", \n')
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    sums = next(o for o in toy if o.startswith("data.path=")).partition("=")[2]
    cases = [
        ([f"data.path={broken}", "data.prompt=q", "data.answer=a"], [f"{broken}:2"]),
        ([f"data.path={empty}", "data.prompt=q", "data.answer=a"], [str(empty), "empty"]),
        ([f"data.path={sums}", "data.prompt=question", "data.answer=a"], ["question", "q", "a"]),
        ([f"data.path={tmp_path / 'none.jsonl'}", "data.prompt=q"], ["none.jsonl"]),
        ([f"data.path={sums}", "data.prompt=q", "data.answer=a", "rollout.prompts=5000"], ["5000", "rollout.prompts"]),
        ([f"data.path={sums}", "data.prompt=q", "data.answer=a", "model.path=./no_model"], ["model.path=./no_model"]),
        ([f"data.path={sums}", "data.prompt=q", "data.answer=a", "data.limit=abc"], ["data.limit", "abc"]),
        ([f"data.path={sums}", "data.prompt=q", "data.answer=a", "reward=function", "reward.function.path=f"], ["f"]),
    ]  # fmt: skip
    for number, (options, expected) in enumerate(cases):
        folder = tmp_path / f"run{number}"
        code, _, err = command(*good, *options, f"hydra.run.dir={folder}")
        assert code == 2, err
        lines = [line for line in err.splitlines() if line.startswith("grpo_lightning:")]
        assert len(lines) == 1 and "Traceback" not in err, err
        for part in expected:
            assert part in lines[0], lines[0]
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["status"] == "failed" and summary["message"] in lines[0]


def test_the_command_itself_ends_with_code_2(tmp_path):
    train = Path(__file__).parent.parent / "train.py"
    done = subprocess.run(
        [sys.executable, str(train), "clipping=higher"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and done.stdout == "" and not list(tmp_path.iterdir())
    assert (
        done.stderr.strip()
        == "grpo_lightning: wrong usage: clipping: no such option; the group is called clip: write clip=..."
    )
