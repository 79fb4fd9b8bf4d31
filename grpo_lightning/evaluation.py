"""Evaluation on held-out prompts: the one function behind validation during training and evaluate.py."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from grpo_lightning.data.prompts import Prompt
from grpo_lightning.distributed import gather, join, share
from grpo_lightning.reward import RewardBatch, RewardSet
from grpo_lightning.rollout.engine import Engine, Request, SamplingParams, of_all, own_part
from grpo_lightning.rollout.rows import columns_of, reward_batch
from grpo_lightning.rollout.scoring import EagerScorer, Groups

log = logging.getLogger(__name__)

EVAL_STREAM = 1  # keeps validation samples apart from those of training under the same seed


@dataclass(frozen=True)
class Evaluation:
    """Metrics (`val/...`) and one record per sampled completion."""

    metrics: dict[str, float]
    records: list[dict[str, Any]]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k completions drawn without replacement from n, c of them right, is right:
    1 - C(n-c, k) / C(n, k) (Chen et al. 2021, eq. 1), exact and unbiased."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def evaluate(
    engine: Engine,
    prompts: list[Prompt],
    rewards: RewardSet,
    params: SamplingParams,
    decode: Callable[[list[int]], str],
    *,
    samples: int,
    seed: int,
) -> Evaluation:
    """Sample `samples` completions of each prompt at temperature 1, and one greedily; nothing here touches training.

    The sampling keys are those of the prompt alone, so that two evaluations differ by their weights only.

    Returns:
        val/accuracy (mean over samples), val/pass@{samples}, val/greedy, val/reward, val/length_mean,
        val/truncated_fraction.
    """
    sampled = _sample(engine, prompts, rewards, replace(params, temperature=1.0), decode, samples, seed)
    greedy = _sample(engine, prompts, rewards, replace(params, temperature=0.0), decode, 1, seed)
    # A completion without a verdict (its answer cannot be parsed, say) is neither right nor wrong.
    per_prompt = [[r["correct"] for r in sampled[i : i + samples]] for i in range(0, len(sampled), samples)]
    judged = [verdicts for verdicts in per_prompt if None not in verdicts]
    count = len(sampled)
    metrics = {
        "val/accuracy": _mean([r["correct"] for r in sampled]),
        "val/greedy": _mean([r["correct"] for r in greedy]),
        f"val/pass@{samples}": _mean([pass_at_k(samples, sum(verdicts), samples) for verdicts in judged]),
        "val/reward": _mean([r["reward"] for r in sampled]),
        "val/length_mean": sum(r["length"] for r in sampled) / count,
        "val/truncated_fraction": sum(r["finish_reason"] == "length" for r in sampled) / count,
    }
    for record in greedy:
        record["greedy"] = True
    return Evaluation(metrics, sampled + greedy)


def _mean(values: list[Any]) -> float:
    present = [float(value) for value in values if value is not None]
    return sum(present) / len(present) if present else math.nan


def _sample(
    engine: Engine,
    prompts: list[Prompt],
    rewards: RewardSet,
    params: SamplingParams,
    decode: Callable[[list[int]], str],
    samples: int,
    seed: int,
) -> list[dict[str, Any]]:
    requests = [Request(p.token_ids, (seed, EVAL_STREAM, p.prompt_id), samples) for p in prompts]
    own, columns = share(prompts), columns_of(prompts)

    def batch_of(groups: Groups) -> RewardBatch:
        rows = [(own[at], completion, k) for at, completions in groups for k, completion in enumerate(completions)]
        return reward_batch(
            [prompt for prompt, _, _ in rows],
            [completion for _, completion, _ in rows],
            group_ids=[prompt.prompt_id for prompt, _, _ in rows],
            keys=[(seed, EVAL_STREAM, prompt.prompt_id, k) for prompt, _, k in rows],
            decode=decode,
            columns=columns,
        )

    scorer = EagerScorer(engine, rewards, batch_of)
    # Each process scores a part of the prompts.
    mine = share(of_all(engine, scorer.generate(own_part(engine, requests), params)))
    flat = [(prompt, completion) for prompt, completions in zip(own, mine, strict=True) for completion in completions]
    batch = batch_of(list(enumerate(mine)))
    result = rewards(batch, gather, scorer.verdicts(len(mine)))
    for message in dict.fromkeys(message for messages in gather(result.errors) for message in messages):
        log.warning("validation: %s", message)
    records = [
        {
            "prompt": prompt.text,
            "completion": batch.completions[i],
            "reward": None if math.isnan(result.total[i]) else result.total[i],
            "correct": result.correct[i],
            "length": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "prompt_id": prompt.prompt_id,
            "answer": prompt.answer,
            "greedy": False,
        }
        for i, (prompt, completion) in enumerate(flat)
    ]
    by_prompt = [records[i : i + samples] for i in range(0, len(records), samples)]
    return [record for group in join(by_prompt) for record in group]
