"""The embedded model: an ordinary Hugging Face folder, small, careless, and never shown a held-out question."""

import importlib.util
import random
import re
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lightning.data.arithmetic import Arithmetic, is_held_out
from grpo_lightning.reward.exact import Exact
from grpo_lightning.reward.score import RewardBatch

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "grpo_lightning" / "models" / "tiny"


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location("make_tiny_model", ROOT / "scripts" / "make_tiny_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER).eval()


def test_folder_is_small_and_complete():
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sum(files.values()) <= 6_000_000
    needed = "README.md config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json"
    assert set(needed.split()) <= set(files)


def test_model_fits_vllm_and_its_tokenizer(model, tokenizer):
    config = model.config
    assert 300_000 <= model.num_parameters() <= 3_000_000
    assert config.hidden_size % config.num_attention_heads == 0
    assert config.hidden_size // config.num_attention_heads in (32, 64)
    assert config.vocab_size >= len(tokenizer)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.generation_config.eos_token_id == config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    assert tokenizer.bos_token_id is None and tokenizer.chat_template is None


def test_tokenizer_round_trip(tokenizer):
    printable = "".join(map(chr, range(32, 127))) + "\n"
    texts = ["347+285=", "<think>7+5=12,4+8+1=13,3+2+1=6</think>632..", printable, " two  blanks ,. stay", "a\n\nb"]
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
        ended = [*ids, tokenizer.eos_token_id, tokenizer.pad_token_id]
        assert tokenizer.decode(ended, skip_special_tokens=True) == text
    assert len(tokenizer.encode("347+285=")) == 8  # a token per character, none added
    assert len(tokenizer.encode("<think></think>")) == 2
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]


def test_tokenizer_is_the_script_s(maker, tokenizer):
    assert tokenizer.get_vocab() == maker.make_tokenizer().get_vocab()


def test_pretraining_texts_leave_out_held_out_questions(maker):
    held_out = {item.prompt for item in Arithmetic(size=1).load(4000)[1]}
    mirrored = {f"{b}+{a}" for a, b in (prompt.rstrip("=").split("+") for prompt in held_out)}
    for slips in ({}, maker.SLIP):
        for prompt, _ in islice(maker.corpus(5, maker.MIX, slips), 20_000):
            a, b = map(int, prompt.rstrip("=").split("+"))
            assert not is_held_out(a, b)
            assert prompt not in held_out and prompt.rstrip("=") not in mirrored


@pytest.mark.parametrize(
    ("style", "expected"),
    [("direct", "522"), ("short", "<think>12,13,6</think>632"), ("long", "<think>7+5=12,4+8+1=13,3+2+1=6</think>632")],
)
def test_corpus_styles(maker, style, expected):
    assert maker.completion(347, 285, style, 0.0, 0.0, random.Random(0)) == expected


@pytest.mark.parametrize("style", ["short", "long"])
def test_corpus_answers_are_canonical_and_follow_from_their_steps(maker, style):
    rng = random.Random(0)
    wrong = 0
    for _ in range(2000):
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        text = maker.completion(a, b, style, 0.3, 0.25, rng)
        work, answer = re.fullmatch(r"<think>(.*)</think>([1-9]\d*)\.*", text).groups()
        sums = [int(step.rpartition("=")[2]) for step in work.split(",")]
        assert answer == f"{sums[2]}{sums[1] % 10}{sums[0] % 10}"
        wrong += int(answer) != a + b
    assert 0.5 < wrong / 2000 < 0.75  # 1 - 0.7^3


@pytest.fixture
def one_thread():
    """Two threads on a busy machine wait for each other, and a model this small gains nothing from them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("how", [{"do_sample": True, "top_k": 0}, {"do_sample": False}], ids=["sampled", "greedy"])
def test_base_accuracy(model, tokenizer, how, one_thread):
    torch.manual_seed(0)
    items = Arithmetic(size=1).load(384)[1]
    prompts = torch.tensor([tokenizer.encode(item.prompt) for item in items])
    with torch.no_grad():
        output = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=48, **how)
    ids = output[:, prompts.shape[1] :]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    questions, answers = [item.prompt for item in items], [item.answer for item in items]
    scores = Exact()(RewardBatch(prompts=questions, completions=texts, answers=answers))
    assert 0.25 <= sum(scores) / len(items) <= 0.5
    finished = (ids == tokenizer.eos_token_id).any(1).float().mean()
    assert finished > 0.99
