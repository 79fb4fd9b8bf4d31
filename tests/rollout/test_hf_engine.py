"""The in-process engine: what it samples, and that nothing but key and weights decides it."""

from collections import Counter

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, MambaConfig, MistralConfig

from grpo_lightning.errors import UsageError
from grpo_lightning.rollout import cache, decode, hf, packed
from grpo_lightning.rollout.engine import Request, SamplingParams
from grpo_lightning.rollout.hf import HFEngine
from tests.models import VOCABULARY, gpt2, llama

PROMPTS = [(3, 4, 5), (6,), (7, 8, 9, 10, 3), (4, 4)]
PARAMS = SamplingParams(max_new_tokens=12, temperature=0.8, eos_token_ids=(2, 7))


def requests(n: int = 3) -> list[Request]:
    return [Request(prompt, (0, 0, 1, number), n) for number, prompt in enumerate(PROMPTS)]


def engine(model: torch.nn.Module, max_rows: int = 64, version: int = 0) -> HFEngine:
    made = HFEngine(max_rows)
    made.sync(model, version)
    return made


def grouped_llama() -> torch.nn.Module:
    return llama(num_attention_heads=4, num_key_value_heads=2)


def eager_llama() -> torch.nn.Module:
    model = llama(num_attention_heads=4, num_key_value_heads=2)
    model.set_attn_implementation("eager")
    return model


def mistral() -> torch.nn.Module:
    """Each token sees the last 4 only, so that its cache is another one."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.5, sliding_window=4,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def bloom() -> torch.nn.Module:
    """Its attention takes the mask itself, for its biases by distance."""
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=2, initializer_range=0.5)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("make", [llama, gpt2, grouped_llama, eager_llama, mistral, bloom])
def test_sampled_log_probabilities_are_those_of_the_model(make):
    model = make()
    groups = engine(model, version=5).generate(requests(), PARAMS)
    assert [len(group) for group in groups] == [3, 3, 3, 3]
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            ids = torch.tensor([[*prompt, *completion.token_ids]])
            with torch.no_grad():  # one unpadded row at a time, no cache
                logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / PARAMS.temperature
            expected = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None]).squeeze(1)
            torch.testing.assert_close(torch.tensor(completion.logps), expected, atol=1e-4, rtol=1e-4)
            assert completion.weights_version == 5


def test_every_eos_id_ends_a_completion_and_the_last_position_is_not_truncated():
    completions = [c for group in engine(llama()).generate(requests(16), PARAMS) for c in group]
    ends = {c.token_ids[-1] for c in completions if c.finish_reason == "stop"}
    assert ends == {2, 7}, "both end-of-sequence ids should have occurred"
    for c in completions:
        assert len(c.token_ids) == len(c.logps) <= PARAMS.max_new_tokens
        assert not {2, 7} & set(c.token_ids[:-1])
        stopped = c.token_ids[-1] in (2, 7)
        # T11: an end-of-sequence token exactly at the limit is "stop", not "length".
        assert c.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(c.token_ids) == PARAMS.max_new_tokens


def test_completions_do_not_depend_on_batch_position_or_batch_size():
    model = llama()
    together = engine(model).generate(requests(), PARAMS)
    backwards = engine(model).generate(requests()[::-1], PARAMS)[::-1]
    alone = [engine(model).generate([request], PARAMS)[0] for request in requests()]
    chunks = engine(model, max_rows=4).generate(requests(), PARAMS)
    ids = [[c.token_ids for c in group] for group in together]
    for other in (backwards, alone, chunks):
        assert [[c.token_ids for c in group] for group in other] == ids


def test_samples_of_a_group_differ_and_the_key_decides_them():
    model = llama()
    first = engine(model).generate(requests(8), PARAMS)[0]
    assert len({tuple(c.token_ids) for c in first}) > 1
    other = engine(model).generate([Request(PROMPTS[0], (0, 0, 2, 0), 8)], PARAMS)[0]
    assert [c.token_ids for c in other] != [c.token_ids for c in first]


def test_every_position_draws_its_own_number():
    # A nearly flat distribution: with one number for all positions a completion would repeat one token.
    flat = llama(initializer_range=1e-4)
    [group] = engine(flat).generate([Request(PROMPTS[0], (1,), 16)], SamplingParams(12, 1.0, ()))
    assert all(len(set(c.token_ids)) > 4 for c in group)


def test_generation_uses_the_synchronised_weights_and_leaves_the_model_as_it_was():
    first, second = llama(0), llama(1)
    first.train()
    one = engine(first)
    before = one.generate(requests(), PARAMS)
    assert first.training
    one.sync(second, 1)
    after = one.generate(requests(), PARAMS)
    assert [[c.token_ids for c in g] for g in after] == [
        [c.token_ids for c in g] for g in engine(second).generate(requests(), PARAMS)
    ]
    assert [[c.token_ids for c in g] for g in after] != [[c.token_ids for c in g] for g in before]


def test_greedy_is_the_most_likely_token_at_every_position():
    model = llama()
    [[completion]] = engine(model).generate([Request(PROMPTS[2], (0,), 1)], SamplingParams(6, 0.0, (2,)))
    ids = list(PROMPTS[2])
    for token in completion.token_ids:
        with torch.no_grad():
            assert int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()) == token
        ids.append(token)


def test_generate_before_sync_is_an_error():
    with pytest.raises(RuntimeError, match="before sync"):
        HFEngine().generate(requests(), PARAMS)
    with pytest.raises(ValueError, match="max_rows"):
        HFEngine(0)


@pytest.mark.parametrize("make", [llama, gpt2, grouped_llama, eager_llama, bloom])
@pytest.mark.parametrize("prompts", [PROMPTS, [(3, 4, 5), (6, 7, 8)]], ids=["padded", "of one length"])
def test_cache_in_place_gives_the_logits_of_the_dynamic_cache(make, prompts, monkeypatch):
    model, seen = make(), []
    draw = hf.sample_tokens
    monkeypatch.setattr(hf, "sample_tokens", lambda logits, *rest: (seen.append(logits), draw(logits, *rest))[1])
    monkeypatch.setattr(cache, "ROOM", 1)  # so that it grows
    asked = [Request(prompt, (0, 0, 1, number), 5) for number, prompt in enumerate(prompts)]
    engine(model).generate(asked, PARAMS)
    in_place, seen[:] = list(seen), []
    monkeypatch.setattr(decode, "writes_in_place", lambda cache: False)
    engine(model).generate(asked, PARAMS)
    assert len({len(logits) for logits in seen}) > 1, "rows should have left"
    for one, other in zip(in_place, seen, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_which_models_decode_in_place():
    for make, in_place, grouped in ((grouped_llama, True, True), (gpt2, True, True), (eager_llama, True, False),
                                    (bloom, True, False), (mistral, False, False)):  # fmt: skip
        batch, _ = decode.prefill(make(), PROMPTS, np.array([0, 1, 1, 2, 3]), 4, torch.device("cpu"))
        assert (batch.in_place, batch.grouped) == (in_place, grouped), make.__name__


@pytest.mark.parametrize("make", [llama, mistral])
def test_prompts_prefilled_in_parts(make, monkeypatch):
    model = make()
    together = engine(model).generate(requests(), PARAMS)
    monkeypatch.setattr(decode, "PREFILL_TOKENS", 4)
    parts = engine(model).generate(requests(), PARAMS)
    assert [[c.token_ids for c in group] for group in parts] == [[c.token_ids for c in group] for group in together]


def test_finished_rows_leave_the_batch():
    model, batches = llama(), []
    model.lm_head.register_forward_pre_hook(lambda module, args: batches.append(len(args[0])))
    groups = engine(model).generate(requests(6), PARAMS)
    lengths = [len(c.token_ids) for group in groups for c in group]
    assert batches == [len(PROMPTS), *(sum(length > step for length in lengths) for step in range(1, max(lengths)))]


@pytest.mark.parametrize("max_rows", [4, 64])
def test_done_is_told_once_of_each_group_with_its_completions(max_rows):
    told = []
    groups = engine(llama(), max_rows).generate(requests(), PARAMS, done=lambda *group: told.append(group))
    assert Counter(index for index, _ in told) == Counter(range(len(PROMPTS)))
    assert all(completions == groups[index] and len(completions) == 3 for index, completions in told)
    if max_rows == 64:  # as soon as a group is finished, and not at the end
        ends = [max(len(c.token_ids) for c in completions) for _, completions in told]
        assert ends == sorted(ends) and [index for index, _ in told] != sorted(index for index, _ in told)


def test_lengths_can_be_imposed_by_row():
    lengths = np.arange(1, 13)

    class Imposed(HFEngine):
        def _ended(self, tokens, rows, position, eos):
            return position + 1 >= lengths[rows]

    one = Imposed()
    one.sync(llama(), 0)
    groups = one.generate(requests(), PARAMS)
    assert [len(c.token_ids) for group in groups for c in group] == lengths.tolist()
    assert {c.finish_reason for group in groups for c in group} == {"stop"}


def test_packed_layers_compute_the_same_and_are_given_back():
    if not packed.can_pack():
        pytest.skip("no oneDNN kernels for this processor")
    torch.manual_seed(0)
    wide = llama(hidden_size=256, intermediate_size=512, attention_bias=True, initializer_range=0.05)
    ids = torch.randint(3, VOCABULARY, (3, 7))
    with torch.no_grad():
        wide.model.layers[0].self_attn.q_proj.bias.normal_()
        expected = wide(input_ids=ids).logits
        with packed.packed(wide):
            changed = [name for name, module in wide.named_modules() if "forward" in vars(module)]
            torch.testing.assert_close(wide(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
    assert "model.layers.0.mlp.up_proj" in changed and "lm_head" not in changed  # 11 x 256 is too small to pay
    assert not any("forward" in vars(module) for module in wide.modules())

    first = engine(wide).generate(requests(), PARAMS)
    with torch.no_grad():
        wide.model.layers[0].mlp.up_proj.weight.neg_()  # the next copy is of the weights as they are then
    assert engine(wide).generate(requests(), PARAMS) != first


def test_an_interrupted_generation_leaves_the_model_as_it_was():
    model = grouped_llama()

    def fail(index, completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine(model).generate(requests(), PARAMS, done=fail)
    assert model.config._attn_implementation == "sdpa"
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_was_compiled_for_the_update_is_not_compiled_for_decoding():
    model = llama()
    expected = engine(model).generate(requests(), PARAMS)

    def backend(graph, inputs):
        raise AssertionError("compiled while decoding")

    layer = model.model.layers[0]
    layer.compile(backend=backend)
    assert engine(model).generate(requests(), PARAMS) == expected
    assert layer._compiled_call_impl is not None


def test_a_model_without_a_key_value_cache_is_refused_in_one_line():
    config = MambaConfig(vocab_size=11, hidden_size=16, state_size=4, num_hidden_layers=1)
    engine = HFEngine()
    engine.sync(AutoModelForCausalLM.from_config(config), 0)
    with pytest.raises(UsageError, match="rollout=hf cannot sample from a MambaForCausalLM") as caught:
        engine.generate([Request((3, 4), (0,), 2)], SamplingParams(4, 1.0, (2,)))
    assert "\n" not in str(caught.value)
