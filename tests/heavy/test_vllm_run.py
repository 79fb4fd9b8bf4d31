"""Training through the real vLLM in the trainer's process: it learns, and it samples from the current policy."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lightning.model import TINY_MODEL
from tests.heavy.runs import SHORT, train

pytestmark = pytest.mark.heavy


def tied(folder: Path) -> Path:
    """The embedded model, whose embeddings are untied, with its input layer for both. It writes nearly at random."""
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    weights = model.state_dict()
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    model.config.tie_word_embeddings = True
    both = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    both.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    both.generation_config = model.generation_config
    both.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY_MODEL).save_pretrained(folder)
    return folder


def test_the_default_run_learns_as_through_hf_and_samples_from_the_current_policy_throughout(tmp_path):
    through = {
        name: train(tmp_path / name, f"rollout={name}", "logger=none", "trainer=cpu", timeout=900)
        for name in ("hf", "vllm")
    }
    accuracy = {name: result.summary["val_accuracy"] for name, result in through.items()}
    assert through["vllm"].summary["val_accuracy_start"] < 0.5 < 0.9 < accuracy["vllm"]
    assert abs(accuracy["vllm"] - accuracy["hf"]) <= 0.03, accuracy
    gaps = through["vllm"].gaps
    assert len(gaps) == 40 and max(gaps) < 1e-3, gaps


@pytest.mark.parametrize("embeddings", ["untied", "tied"])
def test_engine_and_trainer_agree_at_every_step_with_untied_and_with_tied_embeddings(tmp_path, embeddings):
    model = "tiny" if embeddings == "untied" else str(tied(tmp_path / "model"))
    result = train(tmp_path / "run", f"model.path={model}", "rollout=vllm", *SHORT, timeout=300)
    assert len(result.gaps) == 6 and max(result.gaps) < 1e-3, result.gaps
    trained = AutoModelForCausalLM.from_pretrained(result.folder / "checkpoints" / "model")
    assert torch.equal(trained.lm_head.weight, trained.model.embed_tokens.weight) == (embeddings == "tied")


def test_without_synchronisation_the_gap_shows_it_at_once(tmp_path):
    program = ("-m", "tests.heavy.sync_once")
    result = train(tmp_path / "run", "rollout=vllm", *SHORT, timeout=300, program=program)
    first, *later = result.gaps
    assert first < 1e-3, "the one synchronisation that there was"
    assert later[0] > 1e-3 and max(later) > 1e-2, result.gaps
