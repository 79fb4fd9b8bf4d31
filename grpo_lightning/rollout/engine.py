"""What a rollout engine is: token ids in, sampled token ids with their log-probabilities out."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from grpo_lightning.distributed import gather, join, share
from grpo_lightning.rollout.weights import named_weights


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


Done = Callable[[int, list[Completion]], None]


class Engine(Protocol):
    """A rollout engine. `sync` comes after every optimiser phase, before the next `generate`.

    With several processes each has an engine, which generates for its share of the groups. Where `shared` is true there
    is one for all of them, with process 0; the others have an `Elsewhere`.

    One that generates while the policy is updated (rollout.ahead=1) also has `submit`, which returns the Future of what
    `generate` would return, and whose `sync` waits for what was submitted before.
    """

    name: str
    shared: bool

    def sync(self, policy: nn.Module, version: int) -> None:
        """Take over the policy's weights; completions carry `version` from now on."""

    def generate(
        self, requests: list[Request], params: SamplingParams, done: Done | None = None
    ) -> list[list[Completion]]:
        """The completions of each request, in its order: `len(result[i]) == requests[i].n`.

        `done(i, result[i])` is called, by whatever thread generates, as soon as the group of `requests[i]` is whole:
        once for every request, and before this returns. What it raises ends the generation and is raised here.
        """

    def sleep(self) -> None:
        """No generation until the next `sync`: give accelerator memory back to the trainer."""

    def close(self) -> None:
        """Give back what the engine holds."""


class Elsewhere:
    """Stands, in the other processes, for a shared engine that process 0 has."""

    shared = True

    def __init__(self, name: str) -> None:
        self.name = name

    def sync(self, policy: nn.Module, version: int) -> None:
        for _ in named_weights(policy):  # sharded weights are gathered by all processes together
            pass

    def generate(
        self, requests: list[Request], params: SamplingParams, done: Done | None = None
    ) -> list[list[Completion]]:
        return []

    def submit(self, requests: list[Request], params: SamplingParams) -> "Future[list[list[Completion]]]":
        nothing: Future[list[list[Completion]]] = Future()
        nothing.set_result([])
        return nothing

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        pass


def own_part(engine: Engine, requests: list[Request]) -> list[Request]:
    """The requests, of those of all processes, that this process's engine answers."""
    return requests if engine.shared else share(requests)


def of_all(engine: Engine, answers: list[list[Completion]]) -> list[list[Completion]]:
    """The answers to the requests of all processes, from this process's to its own."""
    return gather(answers)[0] if engine.shared else join(answers)
