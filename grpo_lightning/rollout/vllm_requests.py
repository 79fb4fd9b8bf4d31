"""What both vLLM engines ask for: sampling options, seeds, and the limits of a request."""

import hashlib
from typing import Any

from grpo_lightning.errors import UsageError
from grpo_lightning.rollout.engine import Request, SamplingParams


def request_seed(key: tuple[int, ...], n: int) -> int:
    """The seed of a group, in [0, 2^63): a function of its key alone.

    vLLM gives sample i of a group the seed `seed + i`, and torch's CPU generator reads the lower 32 bits only. So each
    group has a block of its own there: the last part of the key counts blocks from a place hashed from the others.
    """
    block = 1 << (n - 1).bit_length()
    digest = hashlib.blake2b(repr(tuple(map(int, key[:-1]))).encode(), digest_size=8).digest()
    high, low = divmod(int.from_bytes(digest), 1 << 32)
    return (high >> 1) << 32 | (low + int(key[-1])) * block % (1 << 32)


def sampling_options(request: Request, params: SamplingParams) -> dict[str, Any]:
    """vLLM's SamplingParams for one group, by name. Greedy completions are alike, so that one is enough."""
    return {
        "n": 1 if params.temperature == 0 else request.n,
        "temperature": params.temperature,
        "max_tokens": params.max_new_tokens,
        "seed": request_seed(request.key, request.n),
        "logprobs": 0,  # of the sampled token alone
        "detokenize": False,
        "stop_token_ids": list(params.eos_token_ids),
        "ignore_eos": True,  # the ids above end a completion, and no others
    }


def check_requests(requests: list[Request], params: SamplingParams, room: int) -> None:
    """Raise UsageError for a prompt that leaves no room for its completion in the `room` tokens of the engine, or for
    a temperature that vLLM would replace by another."""
    longest = max((len(request.token_ids) for request in requests), default=0)
    if longest + params.max_new_tokens > room:
        raise UsageError(
            f"a prompt of {longest} tokens and rollout.max_new_tokens={params.max_new_tokens} do not fit in the "
            f"{room} tokens of vLLM: lower data.max_prompt_tokens or rollout.max_new_tokens, or raise "
            "rollout.engine.max_model_len as far as the model allows"
        )
    if params.temperature != 0 and not 0.01 <= params.temperature <= 2:
        raise UsageError(f"rollout.temperature must be in [0.01, 2] with vLLM, got {params.temperature}")
