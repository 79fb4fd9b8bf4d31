"""The in-process engine: what it samples, and that nothing but key and weights decides it."""

import pytest
import torch

from grpo_lightning.rollout.engine import Request, SamplingParams
from grpo_lightning.rollout.hf import HFEngine
from tests.models import gpt2, llama

PROMPTS = [(3, 4, 5), (6,), (7, 8, 9, 10, 3), (4, 4)]
PARAMS = SamplingParams(max_new_tokens=12, temperature=0.8, eos_token_ids=(2, 7))


def requests(n: int = 3) -> list[Request]:
    return [Request(prompt, (0, 0, 1, number), n) for number, prompt in enumerate(PROMPTS)]


def engine(model: torch.nn.Module, max_rows: int = 64, version: int = 0) -> HFEngine:
    made = HFEngine(max_rows)
    made.sync(model, version)
    return made


@pytest.mark.parametrize("make", [llama, gpt2])
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
