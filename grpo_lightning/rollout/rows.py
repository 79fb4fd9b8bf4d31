"""From prompts and completions to what rewards see, and to the rows that are trained on."""

import bisect
import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from grpo_lightning.data.prompts import Prompt
from grpo_lightning.reward import RewardBatch, Step
from grpo_lightning.rollout.buffer import Row
from grpo_lightning.rollout.engine import Completion


def reward_batch(
    prompts: list[Prompt],
    completions: list[Completion],
    *,
    group_ids: list[int],
    keys: list[tuple[int, ...]],
    decode: Callable[[list[int]], str],
    columns: list[str],
) -> RewardBatch:
    """Prompts and completions, row by row, as reward components see them. Text is decoded for them alone. `columns` are
    those of all prompts together: the rows here may be a part."""
    return RewardBatch(
        prompts=[prompt.text for prompt in prompts],
        completions=[decode(completion.token_ids) for completion in completions],
        answers=[prompt.answer for prompt in prompts],
        columns={name: [prompt.columns.get(name) for prompt in prompts] for name in columns},
        completion_ids=[completion.token_ids for completion in completions],
        group_ids=group_ids,
        keys=keys,
        finish_reasons=[completion.finish_reason for completion in completions],
    )


def columns_of(prompts: Iterable[Prompt]) -> list[str]:
    """The names of the columns that any of the prompts has."""
    return sorted({name for prompt in prompts for name in prompt.columns})


def make_row(prompt: Prompt, completion: Completion, group_id: int) -> Row:
    token_ids = torch.tensor([*prompt.token_ids, *completion.token_ids])
    return Row(
        token_ids=token_ids,
        loss_mask=torch.arange(len(token_ids)) >= len(prompt.token_ids),
        start=len(prompt.token_ids),
        group_id=group_id,
        prompt_id=prompt.prompt_id,
        sampler_logp=torch.tensor(completion.logps),
        weights_version=completion.weights_version,
    )


def step_positions(
    token_ids: list[int], steps: list[Step], decode: Callable[[list[int]], str]
) -> list[tuple[int, float]]:
    """(position of its last token, reward) of each step with a reward. The last step takes what follows it along: the
    end-of-sequence token has no text of its own."""
    positions, text = [], decode(token_ids) if steps else ""
    for step in steps:
        if step.reward is None:
            continue
        # The first place behind which the text is there up to the end of the step: of a character that is several
        # tokens the first ones decode to something else.
        so_far = partial(_begins, token_ids, decode, text[: step.end])
        at = bisect.bisect_left(range(1, len(token_ids)), True, key=so_far)
        positions.append((len(token_ids) - 1 if step is steps[-1] else at, step.reward))
    return positions


def _begins(token_ids: list[int], decode: Callable[[list[int]], str], text: str, n: int) -> bool:
    """Whether the text of the first n tokens begins with `text`."""
    return decode(token_ids[:n]).startswith(text)


def pad_steps(rows: list[list[tuple[int, float]]]) -> tuple[Tensor, Tensor]:
    """step_rewards [N, S] float64, NaN where there is no such step, and step_ends [N, S] int64, -1 there."""
    most = max(map(len, rows))
    rewards = [[reward for _, reward in row] + [math.nan] * (most - len(row)) for row in rows]
    ends = [[end for end, _ in row] + [-1] * (most - len(row)) for row in rows]
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(ends, dtype=torch.long)
