"""The log-probabilities the objective sees: whatever is shared, packed, cut or recomputed, they and their gradients are
those of the plain rows."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPTNeoConfig

from grpo_lightning import logps
from grpo_lightning.logps import Traits, examine, token_logps
from grpo_lightning.rollout.batch import Batch, collate
from grpo_lightning.rollout.buffer import Row
from tests.models import gpt2, llama
from tests.rollout.test_buffer import row

OWN = Traits(plain_output=False, attention=None)


def rows_of(*pairs: tuple[list[int], list[int]]) -> list[Row]:
    result = []
    for prompt, completion in pairs:
        made = row(len(prompt), len(completion))
        made.token_ids = torch.tensor(prompt + completion)
        result.append(made)
    return result


PAIRS = (([3, 4, 5], [6, 7, 2]), ([8], [9, 2]), ([3, 3, 3, 3, 3], [4, 5, 6, 7, 8, 9]))
SHARED = (([3, 4, 5], [6, 7, 2]), ([3, 4, 5], [9]), ([3, 4, 5], [4, 5, 6, 7, 8, 9]), ([8, 3], [7, 2]), ([8, 3], [7, 4]))


def by_hand(model: nn.Module, pairs, temperature: float):
    """logp and entropy of every row on its own, without padding."""
    out = []
    for prompt, completion in pairs:
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits / temperature, -1)
        chosen = expected.gather(1, torch.tensor(completion)[:, None]).squeeze(1)
        out.append((chosen, -(expected.exp() * expected).sum(-1)))
    return out


def biased_gpt2() -> nn.Module:
    model = gpt2()
    model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, model.lm_head.weight.shape[0]))
    return model


@pytest.mark.parametrize("own_logits", [False, True])
@pytest.mark.parametrize("make", [llama, gpt2, biased_gpt2, lambda: llama(attn_implementation="eager")])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("pairs,packs", [(PAIRS, None), (SHARED, None), (SHARED, [3, 2]), (SHARED, [2, 1, 1, 1])])
def test_log_probabilities_are_those_of_the_rows_on_their_own(make, temperature, pairs, packs, own_logits, monkeypatch):
    # P31, P32, P34: padding, positions, packs and the shift by one change nothing.
    monkeypatch.setattr(logps, "LOGITS_AT_ONCE", 50)  # four tokens at a time, so that there are several parts
    model = make()
    traits = examine(model)
    assert traits.plain_output and traits.attention
    with torch.no_grad():
        batch = collate(rows_of(*pairs), packs)
        logp, entropy, _ = token_logps(model, batch, temperature, OWN if own_logits else traits)
        for n, (chosen, plain_entropy) in enumerate(by_hand(model, pairs, temperature)):
            torch.testing.assert_close(logp[n, : len(chosen)], chosen, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(entropy[n, : len(chosen)], plain_entropy, atol=1e-5, rtol=1e-5)
            assert not logp[n, len(chosen) :].any() and not entropy[n, len(chosen) :].any()


@pytest.mark.parametrize("own_logits", [False, True])
@pytest.mark.parametrize("make", [llama, biased_gpt2])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradients_are_those_of_the_rows_on_their_own(make, with_entropy, own_logits, monkeypatch):
    monkeypatch.setattr(logps, "LOGITS_AT_ONCE", 50)
    model = make().double()  # tied weights and a bias of the output among them
    coefficients = torch.randn(len(SHARED), 6, generator=torch.Generator().manual_seed(0)).double()

    def gradient(terms) -> list[torch.Tensor]:
        model.zero_grad()
        total = sum(
            (coefficients[n, : len(p)] * (p + (coefficients[-n, : len(p)] * h if with_entropy else 0))).sum()
            for n, (p, h) in enumerate(terms)
        )
        total.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradient(by_hand(model, SHARED, 0.7))
    traits = OWN if own_logits else examine(model)
    out = token_logps(model, collate(rows_of(*SHARED), [3, 2]), 0.7, traits, entropy_gradient=with_entropy)
    assert out.entropy.requires_grad == with_entropy
    lengths = [len(completion) for _, completion in SHARED]
    actual = gradient([(out.logp[n, :k], out.entropy[n, :k]) for n, k in enumerate(lengths)])
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_frozen_weights_get_no_gradient_and_cost_none():
    model = llama()
    model.lm_head.requires_grad_(False)
    model.get_input_embeddings().requires_grad_(False)
    token_logps(model, collate(rows_of(*SHARED), [3, 2]), 1.0, examine(model)).logp.sum().backward()
    assert model.lm_head.weight.grad is None and model.model.norm.weight.grad.abs().max() > 0


@pytest.mark.parametrize("own_logits", [False, True])
def test_under_autocast_products_are_in_bfloat16_and_sums_in_float32(own_logits):
    # P40: log-probabilities are those of the model's own bfloat16 logits, normalised in float32; weights and their
    # gradients stay in float32.
    model = llama()
    traits = OWN if own_logits else examine(model)
    batch = collate(rows_of(*PAIRS))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logp, entropy, _ = token_logps(model, batch, 1.0, traits)
        expected = [
            torch.log_softmax(model(input_ids=torch.tensor([p + c])).logits[0, len(p) - 1 : -1].float(), -1)
            for p, c in PAIRS
        ]
    assert logp.dtype == entropy.dtype == torch.float32 and bool((logp <= 0).all())
    for n, (_, completion) in enumerate(PAIRS):
        chosen = expected[n].gather(1, torch.tensor(completion)[:, None]).squeeze(1)
        torch.testing.assert_close(logp[n, : len(completion)], chosen, atol=2e-2, rtol=0)
    logp.sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


class Fixed(nn.Module):
    """Its output layer passes on the hidden states, which are the same logits whatever comes in."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits, self.config = logits, SimpleNamespace()
        self.lm_head = nn.Identity()
        self.lm_head.weight = torch.eye(logits.shape[-1])

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, **_):
        return SimpleNamespace(logits=self.lm_head(self.logits[:, : input_ids.shape[1]]))


def fixed(logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    logp, entropy, _ = token_logps(Fixed(logits), batch, 1.0, OWN)
    return logp, entropy


def test_logits_of_position_t_minus_1_score_token_t():
    # P34: position k puts all mass on token k + 1; the row [0, 1, 2, 3] is right only if shifted by exactly one.
    logits = torch.full((1, 4, 5), -30.0)
    for k in range(4):
        logits[0, k, k + 1] = 30.0
    logp, _ = fixed(logits, collate(rows_of(([0], [1, 2, 3]))))
    torch.testing.assert_close(logp, torch.zeros(1, 3), atol=1e-6, rtol=0)


def test_bfloat16_logits_are_handled_in_float32():
    # P40: bf16 logits [20, 0, ...] over a large vocabulary: logp <= 0 and within 1e-2 of float32.
    logits = torch.zeros(1, 3, 5000)
    logits[..., 1] = 20.0
    batch = collate(rows_of(([1], [1, 1])))
    exact, _ = fixed(logits, batch)
    low, entropy = fixed(logits.bfloat16(), batch)
    assert low.dtype == torch.float32 and bool((low <= 0).all()) and bool(entropy.isfinite().all())
    torch.testing.assert_close(low, exact, atol=1e-2, rtol=0)


def test_a_ruled_out_token_leaves_the_entropy_finite():
    logits = torch.zeros(1, 2, 4)
    logits[..., 3] = -torch.inf
    _, entropy = fixed(logits, collate(rows_of(([1], [1]))))
    torch.testing.assert_close(entropy, torch.tensor([[3.0]]).log())


def test_large_logits_do_not_overflow():
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(1e4)
        batch = collate(rows_of(*PAIRS))
        logp, entropy, _ = token_logps(model, batch, 1.0, examine(model))
        for n, (chosen, _) in enumerate(by_hand(model, PAIRS, 1.0)):
            torch.testing.assert_close(logp[n, : len(chosen)], chosen, rtol=1e-5, atol=1e-3)
            assert bool((entropy[n] >= -1e-3).all() and entropy.isfinite().all())


class Scaled(nn.Module):
    """An output layer of another kind, as models that scale or cap their logits have."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.weight = inner, inner.weight

    def forward(self, hidden):
        return 30 * torch.tanh(self.inner(hidden) / 30)


def test_a_window_that_a_model_counts_for_itself_keeps_rows_apart():
    # GPT-Neo masks by the place in the sequence, which in a pack is not the position.
    torch.manual_seed(0)
    options = dict(vocab_size=11, hidden_size=16, num_layers=2, num_heads=2, max_position_embeddings=64, window_size=12)
    local = AutoModelForCausalLM.from_config(GPTNeoConfig(**options, attention_types=[[["global", "local"], 1]])).eval()
    assert examine(local).attention is None


@pytest.mark.parametrize("own_logits", [False, True])
def test_the_entropy_of_confident_predictions_keeps_its_digits(own_logits):
    # H of (1 - 2 e, e, e) is about 2 e (1 - log e); in the sum 1 + 2 e float32 would keep one digit of e = 1e-7.
    logits = torch.tensor([[0.0, -16.0, -16.0], [0.0, -12.0, -30.0], [3.0, -20.0, 1.0]])
    exact = torch.log_softmax(logits.double(), -1)
    if own_logits:
        logp, entropy = logps._logp_and_entropy(logits, torch.tensor([0, 0, 2]), False)
    else:
        logp, entropy = logps._Readout.apply(logits, torch.eye(3), None, torch.tensor([0, 0, 2]), 1.0, False)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(-1), rtol=2e-6, atol=0)
    torch.testing.assert_close(logp.double(), exact[[0, 1, 2], [0, 0, 2]], rtol=2e-6, atol=0)


def test_an_output_that_rules_tokens_out_is_not_taken_apart():
    banned = biased_gpt2()
    with torch.no_grad():
        banned.lm_head.bias[3] = -torch.inf
    traits = examine(banned)
    assert not traits.plain_output
    out = token_logps(banned, collate(rows_of(([5], [6, 7]))), 1.0, traits)
    assert bool(out.entropy.isfinite().all())


def test_what_a_model_cannot_do_is_found_out():
    assert examine(gpt2()).plain_output
    capped = llama()
    capped.lm_head = Scaled(capped.lm_head)
    assert not examine(capped).plain_output
    small = llama(initializer_range=0.02)  # a cap of 30 does not show on logits of 0.1
    assert examine(small).plain_output
    small.forward = lambda forward=small.forward, **k: SimpleNamespace(logits=30 * torch.tanh(forward(**k).logits / 30))
    assert not examine(small).plain_output
    multiplied = llama()
    multiplied.forward = lambda forward=multiplied.forward, **k: SimpleNamespace(logits=2 * forward(**k).logits)
    assert not examine(multiplied).plain_output, "the logits are not the trunk's times the weight"
    deaf = llama()
    deaf.forward = lambda attention_mask=None, forward=deaf.forward, **k: forward(**k)
    assert examine(deaf).attention is None and examine(deaf).plain_output
    for seed in range(3):
        faint = llama(seed)
        with torch.no_grad():
            faint.lm_head.weight.mul_(1e-4)  # what one token changes of another's logits is tiny here
        assert examine(faint).attention
        faint.forward = lambda attention_mask=None, forward=faint.forward, **k: forward(**k)
        assert examine(faint).attention is None
    private = llama()  # a model with attention code of its own, whose windows may have any name
    private._supports_attention_backend = False
    assert examine(private).attention is None
    windowed = llama()
    windowed.config.sliding_window = 4096
    assert examine(windowed).attention is None, "a window would be lost behind a mask of one's own"
    hybrid = llama()
    hybrid.config.layer_types = ["full_attention", "linear_attention"]
    assert examine(hybrid).attention is None
    flash = llama()
    flash.config._attn_implementation = "flash_attention_2"
    assert not logps._shares(flash, torch.arange(9), torch.zeros(2, 6, 11))


def test_the_cost_of_attention_by_hand():
    # Two layers: q, k, v, o and the three of the MLP; comparing and taking the value of one token are 4 * width FLOP.
    model = llama()
    config = model.config
    d, i = config.hidden_size, config.intermediate_size
    kv = config.num_key_value_heads * d // config.num_attention_heads
    weights = config.num_hidden_layers * (2 * d * d + 2 * d * kv + 3 * d * i)
    assert examine(model).attention == pytest.approx(4 * config.num_hidden_layers * d / (2 * weights))


def test_the_readout_saves_no_tensor_of_the_vocabulary(monkeypatch):
    # [tokens, vocabulary] is what memory is lost to: between forward and backward nothing of that size is kept.
    monkeypatch.setattr(logps, "LOGITS_AT_ONCE", 100)
    model = llama(vocab_size=23)
    traits, saved = examine(model), []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    batch = collate(rows_of(*PAIRS))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        token_logps(model, batch, 1.0, traits)
    vocabulary = model.config.vocab_size
    weights = {p.data_ptr() for p in model.parameters()}
    assert not [t.shape for t in saved if t.shape[-1] == vocabulary and t.data_ptr() not in weights]
    largest = []
    monkeypatch.setattr(logps, "_logits", lambda *args, f=logps._logits: (largest.append(z := f(*args)), z)[1])
    token_logps(model, batch, 1.0, traits).logp.sum().backward()
    assert max(len(z) for z in largest) == 100 // vocabulary and sum(len(z) for z in largest) == 2 * len(batch.targets)
