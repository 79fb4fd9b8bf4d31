"""The in-process rollout engine: the policy itself samples, through transformers, with keyed sampling."""

from collections.abc import Iterator
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from grpo_lightning.rollout.decode import prefill, uncompiled
from grpo_lightning.rollout.engine import Completion, Done, Request, SamplingParams
from grpo_lightning.rollout.packed import packed
from grpo_lightning.rollout.sampling import KeyedRows, sample_tokens
from grpo_lightning.rollout.weights import named_weights


class HFEngine:
    """Samples from the policy in the trainer's own process; the weights are shared, so `sync` copies nothing.

    Of a policy whose weights are sharded over processes it samples from a whole copy, since the processes, which
    generate unequally long, could not gather the shards together token by token.

    Args:
        max_rows: the most completions decoded at once; what bounds the memory of the key-value cache.
    """

    name = "hf"
    shared = False

    def __init__(self, max_rows: int = 256) -> None:
        if max_rows < 1:
            raise ValueError(f"rollout.max_rows must be at least 1, got {max_rows}")
        self.max_rows = max_rows
        self._model: nn.Module | None = None
        self._version = 0

    def sync(self, policy: nn.Module, version: int) -> None:
        self._version = version
        if not any(isinstance(parameter, DTensor) for parameter in policy.parameters()):
            self._model = policy
            return
        if self._model is None:
            model = AutoModelForCausalLM.from_config(cast(PreTrainedConfig, policy.config), dtype=torch.float32)
            self._model = model.to(next(policy.parameters()).device)
        own = self._model.state_dict()
        for name, tensor in named_weights(policy):
            own[name].copy_(tensor)

    def sleep(self) -> None:
        """It holds nothing but what a call needs."""

    def close(self) -> None:
        self._model = None

    @torch.no_grad()
    def generate(
        self, requests: list[Request], params: SamplingParams, done: Done | None = None
    ) -> list[list[Completion]]:
        if self._model is None:
            raise RuntimeError("HFEngine.generate was called before sync: there are no weights to sample from")
        model, was_training = self._model, self._model.training
        model.eval()
        groups: list[list[Completion]] = []
        try:
            with uncompiled(model), packed(model):
                for chunk in self._chunks(requests):
                    groups += self._decode(model, chunk, params, len(groups), done)
        finally:
            model.train(was_training)
        return groups

    def _chunks(self, requests: list[Request]) -> Iterator[list[Request]]:
        # A group of more than max_rows still goes through at once: it is cut between groups only.
        chunk: list[Request] = []
        rows = 0
        for request in requests:
            if chunk and rows + request.n > self.max_rows:
                yield chunk
                chunk, rows = [], 0
            chunk.append(request)
            rows += request.n
        if chunk:
            yield chunk

    def _decode(
        self, model: nn.Module, requests: list[Request], params: SamplingParams, first: int, done: Done | None
    ) -> list[list[Completion]]:
        """The completions of a chunk of requests, of which `first` is the number of the first one."""
        device = next(model.parameters()).device
        log = _Log(requests, params.max_new_tokens, self._version)
        keys = np.array([(*requests[group].key, sample) for group, sample in log.rows], dtype=np.int64)
        eos = torch.tensor(params.eos_token_ids, device=device)
        uniform = KeyedRows(keys)
        live = np.arange(len(keys))  # the row that each line of the batch belongs to
        batch, logits = prefill(model, [r.token_ids for r in requests], log.owner, params.max_new_tokens, device)
        with batch.attention():
            for position in range(params.max_new_tokens):
                uniforms = torch.from_numpy(uniform.at(live, position))
                uniforms = uniforms if device.type == "mps" else uniforms.to(device)
                drawn, logp = sample_tokens(logits, uniforms, params.temperature)
                ended = self._ended(drawn, live, position, eos)
                log.add(live, position, drawn, logp)
                last = position + 1 == params.max_new_tokens
                for group in log.finish(live[ended], "stop", position) + (
                    log.finish(live[~ended], "length", position) if last else []
                ):
                    if done is not None:
                        done(first + group, log.completions[group])
                if last or ended.all():
                    break
                if ended.any():  # finished rows leave the batch: rows from its end take their places
                    count = int(len(ended) - ended.sum())
                    target = np.flatnonzero(ended[:count])
                    source = count + np.flatnonzero(~ended[count:])
                    live[target] = live[source]
                    live = live[:count]
                    drawn = batch.move(source, target, count, drawn)
                logits = batch.step(drawn)
        return log.completions

    def _ended(self, tokens: Tensor, rows: np.ndarray, position: int, eos: Tensor) -> np.ndarray:
        """Which completions end with the token just drawn.

        Args:
            tokens: [L] int64, one for each live row. rows: [L] their numbers within the chunk that is decoded, in the
                order of requests and samples. position: of the tokens in their completions, from 0.
            eos: the ids that end a completion.

        Returns:
            [L] bool.
        """
        return torch.isin(tokens, eos).cpu().numpy()


class _Log:
    """What has been drawn for the rows of a chunk, and the completions of the groups that are finished.

    Attributes:
        rows: (group, sample) of each row. owner: [R] its group.
        completions: of each group, in the order of samples; empty until all of the group are finished.
    """

    def __init__(self, requests: list[Request], max_new_tokens: int, version: int) -> None:
        self.rows = [(group, sample) for group, request in enumerate(requests) for sample in range(request.n)]
        self.owner = np.array([group for group, _ in self.rows])
        self.completions: list[list[Completion]] = [[] for _ in requests]
        self._version = version
        self._tokens = np.empty((len(self.rows), max_new_tokens), dtype=np.int64)
        self._logps = np.empty((len(self.rows), max_new_tokens), dtype=np.float32)
        self._finished: list[Completion | None] = [None] * len(self.rows)
        self._unfinished = [request.n for request in requests]

    def add(self, rows: np.ndarray, position: int, tokens: Tensor, logps: Tensor) -> None:
        self._tokens[rows, position] = tokens.cpu().numpy()
        self._logps[rows, position] = logps.cpu().numpy()

    def finish(self, rows: np.ndarray, reason: str, position: int) -> list[int]:
        """The rows end at this position; returns the groups of which none is left."""
        groups = []
        for row in rows.tolist():
            tokens, logps = (of[row, : position + 1].tolist() for of in (self._tokens, self._logps))
            self._finished[row] = Completion(tokens, logps, reason, self._version)
            group, _ = self.rows[row]
            self._unfinished[group] -= 1
            if not self._unfinished[group]:
                begin = int(np.searchsorted(self.owner, group))
                end = int(np.searchsorted(self.owner, group, side="right"))
                self.completions[group] = [cast(Completion, c) for c in self._finished[begin:end]]
                groups.append(group)
        return groups
