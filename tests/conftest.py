"""A toy model folder, a toy data file, and the command in-process."""

import json
import os
import random
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported, as the command does


import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_lightning.train import main
from tests.models import llama
from tests.whole_run import at, place_of_whole, whole  # noqa: F401


def character_tokenizer() -> PreTrainedTokenizerFast:
    characters = ["<pad>", "+", "<eos>", *"01234567"]
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Command-line options for a run of seconds: a random model of 11 characters on sums below 8."""
    folder = tmp_path_factory.mktemp("toy")
    llama(0, initializer_range=0.02).save_pretrained(folder / "model")
    character_tokenizer().save_pretrained(folder / "model")
    rng = random.Random(0)
    pairs = sorted({(rng.randrange(8), rng.randrange(8), rng.randrange(8)) for _ in range(120)})
    lines = [json.dumps({"q": f"{a}+{b}+{c}", "a": (a + b + c) % 8}) for a, b, c in pairs]
    (folder / "sums.jsonl").write_text("\n".join(lines) + "\n")
    return [
        f"model.path={folder / 'model'}", f"data.path={folder / 'sums.jsonl'}", "data.prompt=q", "data.answer=a",
        "rollout.prompts=4", "rollout.group_size=4", "rollout.max_new_tokens=6", "eval.prompts=8", "eval.samples=2",
        "eval.every=2", "optimizer.lr=0.003", "trainer=cpu", "trainer.max_epochs=3", "checkpoint.every=1",
        "logger=none",
    ]  # fmt: skip


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the command in this process: arguments -> (exit code, output, errors)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err  # type: ignore[return-value]

    return run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"
