"""Keyed sampling: the uniform numbers, and the inverse cumulative distribution."""

import numpy as np
import pytest
import torch

from grpo_lightning.rollout.sampling import keyed_uniform, sample_tokens


def test_uniforms_are_uniform_and_differ_in_every_part_of_the_key():
    keys = np.array([(0, r, p, s, t) for r in range(4) for p in range(10) for s in range(10) for t in range(50)])
    u = keyed_uniform(keys)
    assert u.dtype == np.float64 and u.min() >= 0 and u.max() < 1
    assert len(np.unique(u)) == len(keys)
    # 20,000 numbers: mean 1/2 +- 4 sigma, and each tenth of [0, 1) holds a tenth of them.
    assert abs(u.mean() - 0.5) < 4 / np.sqrt(12 * len(u))
    assert np.abs(np.histogram(u, 10, (0, 1))[0] / len(u) - 0.1).max() < 0.01
    # Neighbouring keys are uncorrelated in each part.
    for shift in (1, 50, 500, 5000):
        assert abs(np.corrcoef(u[:-shift], u[shift:])[0, 1]) < 0.03


def test_uniforms_depend_on_the_key_alone():
    keys = np.array([(7, 1, 2, 3), (7, 1, 2, 4), (8, 1, 2, 3)])
    together = keyed_uniform(keys)
    assert [keyed_uniform(key)[0] for key in keys] == together.tolist()
    assert keyed_uniform(keys[::-1]).tolist() == together[::-1].tolist()


def test_tokens_are_read_off_the_cumulative_distribution():
    # Probabilities 0.2, 0.3, 0, 0.5: cumulative 0.2, 0.5, 0.5, 1.
    logits = torch.tensor([0.2, 0.3, 0.0, 0.5]).log().expand(5, 4)
    u = torch.tensor([0.0, 0.19, 0.21, 0.51, 0.999], dtype=torch.float64)
    tokens, logp = sample_tokens(logits, u, 1.0)
    assert tokens.tolist() == [0, 0, 1, 3, 3]
    torch.testing.assert_close(logp.exp(), torch.tensor([0.2, 0.2, 0.3, 0.5, 0.5]))


def test_log_probabilities_are_of_the_tempered_distribution():
    # P37: logits [2, 0]: logp of the first token is -.126928 at T=1, -.035052 at T=.6, -.018150 at T=.5.
    logits, u = torch.tensor([[2.0, 0.0]]), torch.zeros(1, dtype=torch.float64)
    for temperature, expected in ((1.0, -0.126928), (0.6, -0.035052), (0.5, -0.018150)):
        _, logp = sample_tokens(logits, u, temperature)
        assert abs(float(logp) - expected) < 1e-6


def test_temperature_zero_takes_the_most_likely_token():
    tokens, logp = sample_tokens(torch.tensor([[0.0, 3.0, 1.0]]), torch.tensor([0.0]).double(), 0.0)
    assert tokens.tolist() == [1]
    torch.testing.assert_close(logp, torch.log_softmax(torch.tensor([0.0, 3.0, 1.0]), -1)[1:2])


def test_empirical_frequencies_follow_the_distribution():
    n = 20_000
    u = torch.from_numpy(keyed_uniform(np.array([(3, i) for i in range(n)])))
    probabilities = torch.tensor([0.05, 0.6, 0.35])
    tokens, _ = sample_tokens(probabilities.log().expand(n, 3), u, 1.0)
    frequencies = torch.bincount(tokens, minlength=3) / n
    torch.testing.assert_close(frequencies, probabilities, atol=0.015, rtol=0)


def spread(rows: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(rows, vocabulary, generator=generator)
    logits[:, ::7] = -torch.inf
    logits[:, 256:512] = -torch.inf  # a whole block
    return logits, torch.rand(rows, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("vocabulary", [5, 256, 257, 1000, 2048])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_blocks_of_the_vocabulary_change_nothing(vocabulary, temperature):
    logits, u = spread(400, vocabulary)
    tokens, logp = sample_tokens(logits, u, temperature)
    exact = torch.log_softmax(logits.double() / temperature, -1)
    cumulative = exact.exp().cumsum(-1)
    expected = (cumulative <= u[:, None] * cumulative[:, -1:]).sum(-1)
    assert tokens.tolist() == expected.tolist()
    torch.testing.assert_close(logp, exact.gather(1, tokens[:, None])[:, 0].float(), atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("vocabulary", [5, 256, 1000, 2048])
def test_a_token_of_probability_zero_is_never_drawn(vocabulary):
    logits, _ = spread(50, vocabulary)
    logits[:, -vocabulary // 3 :] = -torch.inf
    possible = logits[0].isfinite().nonzero()[:, 0]
    for u, token in ((0.0, int(possible[0])), (1 - 2**-53, int(possible[-1]))):
        logits[:, possible] = torch.randn(50, len(possible), generator=torch.Generator().manual_seed(1))
        tokens, _ = sample_tokens(logits, torch.full((50,), u, dtype=torch.float64), 1.0)
        assert set(tokens.tolist()) == {token}


def test_a_row_does_not_depend_on_the_others():
    logits, u = spread(700, 1000)  # more rows than are worked on at once
    tokens, logp = sample_tokens(logits, u, 0.9)
    for row in (0, 261, 262, 263, 699):
        alone, alone_logp = sample_tokens(logits[row : row + 1], u[row : row + 1], 0.9)
        assert int(alone) == int(tokens[row])
        torch.testing.assert_close(alone_logp, logp[row : row + 1])
    order = torch.randperm(700, generator=torch.Generator().manual_seed(2))
    assert sample_tokens(logits[order], u[order], 0.9)[0].tolist() == tokens[order].tolist()
