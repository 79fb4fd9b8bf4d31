"""Keyed sampling: which token is drawn depends on a key and the distribution, never on batch position or world size.

One uniform number belongs to each (seed, stream, prompt, sample, position); the token is read off the inverse of the
cumulative distribution, which is accumulated in float64 from probabilities in float32.
"""

import numpy as np
import torch
from torch import Tensor

BLOCK = 256  # tokens of the vocabulary whose probabilities are summed up at first


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
    # A few rows at a time: what is worked on stays in the processor's cache, and no further tensor [N, V] is made.
    rows = max(1, (2**18 if logits.device.type == "cpu" else 2**26) // logits.shape[-1])
    parts = [_sample(some, u, temperature) for some, u in zip(logits.split(rows), uniforms.split(rows), strict=True)]
    return torch.cat([tokens for tokens, _ in parts]).to(device), torch.cat([logp for _, logp in parts]).to(device)


def _sample(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    scaled = logits.float() if temperature in (0, 1) else logits.float() / temperature
    rows, vocabulary = scaled.shape
    top = scaled.amax(-1, keepdim=True)
    # The vocabulary in blocks: only the sums of the blocks and the block that is drawn from are accumulated.
    size = min(BLOCK, vocabulary)
    mass = scaled.new_zeros(rows, -(-vocabulary // size), size)
    inside = mass.view(rows, -1)[:, :vocabulary]
    torch.sub(scaled, top, out=inside)
    inside.exp_()
    sums = mass.sum(-1, dtype=torch.float64)
    cumulative = sums.cumsum(-1)
    total = cumulative[:, -1:]
    if temperature == 0:
        tokens = logits.argmax(-1, keepdim=True)
    elif mass.shape[1] == 1:
        tokens = _first_above(mass.squeeze(1).double().cumsum(-1), uniforms.unsqueeze(-1) * total)
    else:
        target = uniforms.unsqueeze(-1) * total
        block = _first_above(cumulative, target)
        rest = (target - (cumulative - sums).gather(-1, block)).clamp_(min=0)
        drawn = mass[torch.arange(rows, device=mass.device), block.squeeze(-1)]
        tokens = block * size + _first_above(drawn.double().cumsum(-1), rest)
        tokens.clamp_(max=vocabulary - 1)  # of logits that are not finite
    logp = scaled.gather(-1, tokens) - top - total.log()
    return tokens.squeeze(-1), logp.squeeze(-1).float()


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """The first index of each row [N, K] whose cumulative mass exceeds the target [N, 1] >= 0: it has mass of its own.

    A target that rounding has lifted to the whole mass counts as just below it.
    """
    whole = cumulative[:, -1:]
    below = torch.minimum(target, torch.nextafter(whole, torch.zeros_like(whole)))
    return torch.searchsorted(cumulative, below, right=True).clamp_(max=cumulative.shape[-1] - 1)
