"""Keyed sampling: which token is drawn depends on a key and the distribution, never on batch position or world size.

One uniform number belongs to each (seed, stream, prompt, sample, position); the token is read off the inverse of the
cumulative distribution in float64.
"""

import numpy as np
import torch
from torch import Tensor


def _mix(x: np.ndarray) -> np.ndarray:
    # The finaliser of SplitMix64 (Steele, Lea and Flood 2014): every input bit reaches every output bit.
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keyed_uniform(keys: np.ndarray) -> np.ndarray:
    """Uniform numbers from integer keys.

    Args:
        keys: [N, K] integers; each row is one key, such as (seed, stream, prompt, sample, position).

    Returns:
        [N] float64 in [0, 1). Equal keys give equal numbers on every machine.
    """
    parts = np.atleast_2d(np.asarray(keys)).astype(np.int64).view(np.uint64)
    state = np.full(parts.shape[0], 0x9E3779B97F4A7C15, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for column in parts.T:
            state = _mix(state + np.uint64(0x9E3779B97F4A7C15) + _mix(column + np.uint64(0x632BE59BD9B4E019)))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample_tokens(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw one token per row by the inverse cumulative distribution.

    Args:
        logits: [N, V], any floating dtype.
        uniforms: [N] float64 in [0, 1). Not read when `temperature` is 0.
        temperature: 0 takes the most likely token; otherwise the distribution is softmax(logits / temperature).

    Returns:
        tokens [N] int64 and their log-probabilities [N] float32 under the distribution sampled from
        (at temperature 0: under softmax(logits)).
    """
    device = logits.device
    if device.type == "mps":  # which has no float64
        logits, uniforms = logits.cpu(), uniforms.cpu()
    logp = torch.log_softmax(logits.double() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        tokens = logits.argmax(-1)
    else:
        cumulative = logp.exp().cumsum(-1)
        # right=True: the first token whose cumulative mass exceeds u, so a token of probability 0 is never drawn.
        target = uniforms.unsqueeze(-1) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
    drawn_logp = logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float()
    return tokens.to(device), drawn_logp.to(device)
