"""The policy as a Hugging Face folder: at the end of a run, and from a checkpoint."""

import filecmp
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lightning.errors import RunError, UsageError
from grpo_lightning.export import export, export_checkpoint
from grpo_lightning.model import load_tokenizer
from grpo_lightning.rollout.weights import named_weights
from tests.conftest import character_tokenizer
from tests.models import llama
from tests.test_lora import adapted, adapter_folder

ROOT = Path(__file__).parent.parent


def same_files(left: Path, right: Path) -> bool:
    names = sorted(file.name for file in left.iterdir())
    return names == sorted(file.name for file in right.iterdir()) and all(
        filecmp.cmp(left / name, right / name, shallow=False) for name in names
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_a_folder_is_an_ordinary_model_whose_files_all_may_read(tied, lora, tmp_path):
    policy = llama(tie_word_embeddings=tied)
    policy.generation_config.eos_token_id = [2, 7]
    policy = adapted(policy) if lora else policy
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "leftover").write_text("of an export that was killed")
    export(policy, character_tokenizer(), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {oct(file.stat().st_mode)[-3:] for file in (tmp_path / "out").iterdir()} == {"644"}
    assert not (tmp_path / "out" / "leftover").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.generation_config.eos_token_id == [2, 7] and loaded.dtype == torch.float32
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, policy(ids).logits, atol=1e-5, rtol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    prompt = torch.tensor([tokenizer("1+2").input_ids])
    said = loaded.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
    assert said.shape[1] > prompt.shape[1]


def test_a_tied_layer_is_written_once_also_where_its_names_come_in_separate_memory(tmp_path, monkeypatch):
    # As they do when they are gathered from several processes, or copied from a GPU.
    monkeypatch.setattr(
        "grpo_lightning.export.named_weights", lambda model: ((n, w.clone()) for n, w in named_weights(model))
    )
    policy = llama(tie_word_embeddings=True)
    export(policy, character_tokenizer(), tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == policy.state_dict().keys() - {"lm_head.weight"}


def test_a_whole_folder_gives_way_to_a_whole_one_only(tmp_path, monkeypatch):
    out = tmp_path / "out"
    export(llama(0), character_tokenizer(), out)
    before = {file.name: file.read_bytes() for file in out.iterdir()}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    policy = llama(1)
    monkeypatch.setattr(policy, "save_pretrained", full)
    with pytest.raises(RunError, match=r"could not be written to .*out: .*No space left"):
        export(policy, character_tokenizer(), out)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    export(llama(1), character_tokenizer(), out)
    assert (out / "model.safetensors").read_bytes() != before["model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


RUNS = {
    "full": [],
    "lora": ["model.lora.r=4", "model.lora.target_modules=[q_proj,down_proj]", "optimizer.lr=0.05"],
    "lora_on_adapter": ["model.lora.r=4"],
}


@pytest.mark.parametrize("kind", RUNS)
def test_the_last_checkpoint_gives_the_folder_that_the_run_wrote(kind, command, toy, tmp_path):
    options, run = [*toy, *RUNS[kind], "reward=[random]", "eval.reward=exact"], tmp_path / "run"
    if kind == "lora_on_adapter":
        options[0] = f"model.path={adapter_folder(tmp_path / 'sft', Path(toy[0].partition('=')[2]))}"
    assert command(*options, "trainer.max_epochs=2", f"hydra.run.dir={run}")[0] == 0
    checkpoints = run / "checkpoints"
    export_checkpoint(checkpoints / "rollout=000002.ckpt", tmp_path / "deep" / "out")
    assert same_files(tmp_path / "deep" / "out", checkpoints / "model")
    export_checkpoint(checkpoints / "rollout=000001.ckpt", tmp_path / "first")
    weights = [folder / "model.safetensors" for folder in (tmp_path / "first", checkpoints / "model")]
    assert weights[0].read_bytes() != weights[1].read_bytes()


def test_the_script_says_what_is_wrong_in_one_line(command, toy, tmp_path):
    assert command(*toy, "trainer.max_epochs=1", f"hydra.run.dir={tmp_path / 'run'}")[0] == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "rollout=000001.ckpt"

    def script(*arguments: object) -> subprocess.CompletedProcess[str]:
        call = [sys.executable, str(ROOT / "scripts" / "export.py"), *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(call, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)

    done = script(checkpoint, "out")
    assert done.returncode == 0 and "out is ready" in done.stdout and "model.safetensors" in done.stdout
    assert same_files(tmp_path / "out", tmp_path / "run" / "checkpoints" / "model")
    assert load_tokenizer(str(tmp_path / "out")).eos_token == "<eos>"
    again = script(checkpoint, "out")
    assert again.returncode == 2 and "not an empty folder" in again.stderr and again.stderr.count("\n") == 1
    assert script(checkpoint).returncode == 2


def test_a_checkpoint_that_cannot_be_used_writes_nothing(command, toy, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    assert command(*toy, "model.lora.r=2", "trainer.max_epochs=1", f"hydra.run.dir={run}")[0] == 0
    good = run / "checkpoints" / "rollout=000001.ckpt"
    config = (run / "config.yaml").read_text()
    damaged = run / "checkpoints" / "damaged.ckpt"
    damaged.write_bytes(good.read_bytes()[:2000])
    other = run / "checkpoints" / "other.ckpt"
    torch.save({"weights": 1}, other)
    away = tmp_path / "away" / "checkpoints" / "copy.ckpt"
    away.parent.mkdir(parents=True)
    away.write_bytes(good.read_bytes())
    for path, match in (
        (run / "checkpoints" / "rollout=000009.ckpt", "no such file"),
        (run / "checkpoints", "no such file"),
        (damaged, "is damaged"),
        (other, "is damaged, or not the checkpoint of a run"),
        (away, "lies in no run folder"),
    ):
        with pytest.raises(UsageError, match=match) as caught:
            export_checkpoint(path, out)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    for before, after, match in (("r: 2", "r: null", "in one of them only"), ("r: 2", "r: 3", "size mismatch")):
        assert before in config
        (run / "config.yaml").write_text(config.replace(before, after))
        with pytest.raises(UsageError, match=f"is not of the model in.*{match}"):
            export_checkpoint(good, out)
    (run / "config.yaml").write_text(config)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="not an empty folder"):
        export_checkpoint(good, tmp_path / "file")
    assert not out.exists()
    out.mkdir()
    export_checkpoint(good, out)
    assert (out / "model.safetensors").exists()
