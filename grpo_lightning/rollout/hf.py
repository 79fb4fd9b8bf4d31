"""The in-process rollout engine: the policy itself samples, through transformers, with keyed sampling."""

from collections.abc import Iterator
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig

from grpo_lightning.rollout.engine import Completion, Request, SamplingParams
from grpo_lightning.rollout.sampling import keyed_uniform, sample_tokens
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
    def generate(self, requests: list[Request], params: SamplingParams) -> list[list[Completion]]:
        if self._model is None:
            raise RuntimeError("HFEngine.generate was called before sync: there are no weights to sample from")
        model, was_training = self._model, self._model.training
        model.eval()
        try:
            return [group for chunk in self._chunks(requests) for group in self._decode(model, chunk, params)]
        finally:
            model.train(was_training)

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

    def _decode(self, model: nn.Module, requests: list[Request], params: SamplingParams) -> list[list[Completion]]:
        device = next(model.parameters()).device
        rows = [(number, sample) for number, request in enumerate(requests) for sample in range(request.n)]
        keys = np.array([(*requests[number].key, sample) for number, sample in rows], dtype=np.int64)
        eos = torch.tensor(params.eos_token_ids, device=device)
        tokens: list[list[int]] = [[] for _ in rows]
        logps: list[list[float]] = [[] for _ in rows]
        stopped = [False] * len(rows)

        # Each prompt is prefilled once; its cache is then copied to the rows of its group.
        logits, cache, mask = _prefill(model, [request.token_ids for request in requests], device)
        owner = torch.tensor([number for number, _ in rows], device=device)
        cache.batch_select_indices(owner)
        logits, mask = logits[owner], mask[owner]
        live = np.arange(len(rows))  # the row each line of the batch belongs to

        for position in range(params.max_new_tokens):
            position_keys = np.column_stack([keys[live], np.full(len(live), position)])
            uniforms = torch.from_numpy(keyed_uniform(position_keys))
            uniforms = uniforms if device.type == "mps" else uniforms.to(device)
            drawn, drawn_logp = sample_tokens(logits, uniforms, params.temperature)
            ended = torch.isin(drawn, eos).cpu().numpy()
            for row, token, logp, end in zip(live.tolist(), drawn.tolist(), drawn_logp.tolist(), ended, strict=True):
                tokens[row].append(token)
                logps[row].append(logp)
                stopped[row] = bool(end)
            if ended.all() or position + 1 == params.max_new_tokens:
                break
            if ended.any():  # finished rows leave the batch
                keep = torch.from_numpy(np.flatnonzero(~ended)).to(device)
                cache.batch_select_indices(keep)
                mask, drawn, live = mask[keep], drawn[keep], live[~ended]
            mask = torch.cat([mask, mask.new_ones(len(live), 1)], dim=1)
            out = model(
                input_ids=drawn.unsqueeze(1),
                attention_mask=mask,
                position_ids=mask.sum(1, keepdim=True) - 1,
                past_key_values=cache,
                use_cache=True,
            )
            logits = out.logits[:, -1]

        groups: list[list[Completion]] = [[] for _ in requests]
        for row, (number, _) in enumerate(rows):
            reason = "stop" if stopped[row] else "length"
            groups[number].append(Completion(tokens[row], logps[row], reason, self._version))
        return groups


def _prefill(
    model: nn.Module, prompts: list[tuple[int, ...]], device: torch.device
) -> tuple[Tensor, DynamicCache, Tensor]:
    """Logits [P, V] after each left-padded prompt, the key-value cache, and the attention mask [P, S]."""
    width = max(len(ids) for ids in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for number, prompt in enumerate(prompts):
        ids[number, width - len(prompt) :] = torch.tensor(prompt)
        mask[number, width - len(prompt) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    out = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        past_key_values=DynamicCache(config=cast(PreTrainedConfig, model.config)),
        use_cache=True,
        logits_to_keep=1,
    )
    return out.logits[:, -1], out.past_key_values, mask
