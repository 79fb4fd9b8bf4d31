"""Loading, dropout and end-of-sequence ids."""

import sys
from types import SimpleNamespace

import pytest
import torch

from grpo_lightning.build import _check_room
from grpo_lightning.errors import UsageError
from grpo_lightning.model import disable_dropout, eos_token_ids, hasten, load_policy, load_tokenizer
from tests.models import VOCABULARY, gpt2, llama


def test_dropout_is_off_in_training_mode_too():
    model = gpt2(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).train()
    ids = torch.arange(3, 9)[None]
    assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    disable_dropout(model)
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    attention = llama(attention_dropout=0.5).train()
    disable_dropout(attention)
    assert torch.equal(attention(input_ids=ids).logits, attention(input_ids=ids).logits)


def test_every_end_of_sequence_id_is_found():
    # P29: the generation config may list several; the tokenizer may know another.
    model = llama()
    model.generation_config.eos_token_id = [2, 7]
    assert eos_token_ids(model, SimpleNamespace(eos_token_id=9)) == (2, 7, 9)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    assert eos_token_ids(model, SimpleNamespace(eos_token_id=0)) == (0,)
    with pytest.raises(UsageError, match="end-of-sequence"):
        eos_token_ids(model, SimpleNamespace(eos_token_id=None))


def test_weights_are_float32_whatever_the_folder_holds(tmp_path):
    llama().bfloat16().save_pretrained(tmp_path)
    assert {p.dtype for p in load_policy(str(tmp_path)).parameters()} == {torch.float32}


def test_a_path_that_cannot_be_loaded_is_one_line(tmp_path):
    for path, match in (
        ("./nowhere", "no such folder"),
        (str(tmp_path), "no config.json"),
        ("a/b/c", "no such folder"),
    ):
        with pytest.raises(UsageError, match=match) as caught:
            load_policy(path)
        assert path in str(caught.value) and "\n" not in str(caught.value)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="could not be loaded"):
        load_tokenizer(str(tmp_path))


def test_vocabulary_constant_matches_the_models():
    assert llama().config.vocab_size == gpt2().config.vocab_size == VOCABULARY


def test_liger_and_compile_say_what_they_need(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"model\.liger=true: Liger's kernels need a GPU"):
        hasten(llama(), compile=False, liger=True)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UsageError, match=r"model\.compile=true needs a C\+\+ compiler"):
        hasten(llama(), compile=True, liger=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(UsageError, match="pip install liger-kernel"):
        hasten(llama(), compile=False, liger=True)


def test_liger_is_applied_to_the_model_given(monkeypatch):
    given = []
    kernels = SimpleNamespace(_apply_liger_kernel_to_instance=lambda model: given.append(model))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace(transformers=kernels))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", kernels)
    model = llama()
    hasten(model, compile=False, liger=True)
    assert given == [model]
    hasten(model, compile=False, liger=False)
    assert given == [model]


def test_compiled_layers_compute_the_same_and_keep_the_names_of_the_weights(monkeypatch):
    plain, model = llama(), llama()
    compiled = []
    monkeypatch.setattr("torch.nn.Module.compile", lambda self, **options: compiled.append((type(self), options)))
    hasten(model, compile=True, liger=False)
    assert compiled == [(type(model.model.layers[0]), {"dynamic": True})] * 2
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_longrope_is_refused_where_its_frequencies_would_change():
    # transformers takes them by the longest row of a batch: a row's log-probabilities would depend on the others.
    model = llama()
    _check_room(model, 100, 28)
    with pytest.raises(UsageError, match=r"100 tokens and rollout\.max_new_tokens=29 do not fit in the 128 positions"):
        _check_room(model, 100, 29)
    model.config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    _check_room(model, 50, 14)
    with pytest.raises(UsageError, match=r"do not fit in the 64 positions up to which the model's longrope"):
        _check_room(model, 50, 15)


@pytest.mark.parametrize("name", ["egaer", "flash_attention_2"])
def test_an_attention_that_is_not_there_is_named_as_the_option_that_asks_for_it(name):
    with pytest.raises(UsageError, match=f"^model.attn_implementation={name}: ") as caught:
        load_policy("tiny", attn_implementation=name)
    assert "\n" not in str(caught.value)
