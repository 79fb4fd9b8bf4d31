"""Keyed sampling: the uniform numbers, and the inverse cumulative distribution."""

import numpy as np
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
