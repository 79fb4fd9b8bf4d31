"""What a rollout engine is: token ids in, sampled token ids with their log-probabilities out."""

from dataclasses import dataclass
from typing import Protocol

from torch import nn


@dataclass(frozen=True)
class SamplingParams:
    """How completions are sampled. There is no top-p, top-k or min-p: the importance ratio assumes the full softmax.

    Attributes:
        max_new_tokens: the most tokens a completion may have, its end-of-sequence token included.
        temperature: logits are divided by it; 0 is greedy.
        eos_token_ids: any of these ends a completion and belongs to it.
    """

    max_new_tokens: int
    temperature: float
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """A group to sample: `n` completions of one prompt, keyed by `key` (the sample number is appended)."""

    token_ids: tuple[int, ...]
    key: tuple[int, ...]
    n: int


@dataclass(frozen=True)
class Completion:
    """One sampled completion.

    Attributes:
        token_ids: the sampled ids, never decoded and encoded again; the end-of-sequence id is included.
        logps: the engine's log-probability of each sampled token (sampler_logp), at the sampling temperature.
        finish_reason: "stop" when it ended with an end-of-sequence token (also at the last allowed position),
            else "length".
        weights_version: the number of optimiser steps of the weights that sampled it.
    """

    token_ids: list[int]
    logps: list[float]
    finish_reason: str
    weights_version: int


class Engine(Protocol):
    """A rollout engine. `sync` comes after every optimiser phase, before the next `generate`.

    One that generates while the policy is updated (rollout.ahead=1) also has `submit`, which returns the Future of what
    `generate` would return, and whose `sync` waits for what was submitted before.
    """

    name: str

    def sync(self, policy: nn.Module, version: int) -> None:
        """Take over the policy's weights; completions carry `version` from now on."""

    def generate(self, requests: list[Request], params: SamplingParams) -> list[list[Completion]]:
        """The completions of each request, in its order: `len(result[i]) == requests[i].n`."""

    def sleep(self) -> None:
        """No generation until the next `sync`: give accelerator memory back to the trainer."""

    def close(self) -> None:
        """Give back what the engine holds."""
