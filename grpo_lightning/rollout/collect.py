"""One exploration: draw prompts, sample a group of completions for each, score them, and make the rows to train on."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.clock import PhaseClock
from grpo_lightning.data.prompts import Prompt, PromptStream
from grpo_lightning.distributed import gather, join, share
from grpo_lightning.errors import RunError
from grpo_lightning.objective import Objective
from grpo_lightning.reward import RewardBatch, RewardSet
from grpo_lightning.rollout.batch import pad_completions
from grpo_lightning.rollout.buffer import Row, Scores
from grpo_lightning.rollout.engine import Completion, Engine, Request, SamplingParams, of_all, own_part
from grpo_lightning.rollout.groups import Ahead, Draw, Group, Rollout
from grpo_lightning.rollout.metrics import rollout_metrics
from grpo_lightning.rollout.rows import columns_of, make_row, pad_steps, reward_batch, step_positions
from grpo_lightning.rollout.scoring import EagerScorer, Groups

log = logging.getLogger(__name__)

TRAIN_STREAM = 0  # keeps training samples apart from those of validation under the same seed


class Collector:
    """Draws prompts, generates, scores, applies the objective's rollout-level parts, and keeps surplus groups.

    With several processes each generates and scores a share of the groups; all of them then have all groups, so that
    everything that follows is computed alike on each.

    Args:
        prompts_per_rollout: P, over all processes. group_size: G. seed: of the sampling keys.
        score: (rows, reference?) -> what the trainer says of each row under the policy that sampled it, or under the
            frozen reference policy. has_critic: the former have the critic's values.
        decode: token ids -> text.
        old_logp: "trainer" scores old_logp; "sampler" takes the engine's for it, which saves that pass.
        kept_weights: a context in which the policy has the weights that sampled the draw ahead.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        stream: PromptStream,
        rewards: RewardSet,
        objective: Objective,
        sampling: SamplingParams,
        prompts_per_rollout: int,
        group_size: int,
        seed: int,
        needs_old_logp: bool,
        score: Callable[[Sequence[Row], bool], list[Scores]],
        decode: Callable[[list[int]], str],
        clock: PhaseClock,
        old_logp: str = "trainer",
        has_critic: bool = False,
        kept_weights: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.engine, self.stream, self.rewards, self.objective = engine, stream, rewards, objective
        self.sampling, self.prompts_per_rollout, self.group_size = sampling, prompts_per_rollout, group_size
        self.seed, self.needs_old_logp, self.score, self.has_critic = seed, needs_old_logp, score, has_critic
        self.decode, self.clock = decode, clock
        self.old_logp, self.kept_weights = old_logp, kept_weights
        self.surplus: list[Group] = []
        self._ahead: Ahead | None = None
        self._ready: Draw | None = None

    def collect(self, number: int) -> Rollout:
        """Rollout `number` (from 1): at most `sampling.max_draws` draws of P prompts, until P groups are kept."""
        # A surplus group may be one rollout old, not more: its importance ratio would drift out of the clip range.
        kept = [group for group in self.surplus if number - group.rollout <= 1]
        reused, drawn, draws, seconds = len(kept), list[Group](), 0, 0.0
        errors: list[str] = []
        # What was drawn ahead is older next time, so it enters even where surplus groups are enough.
        while self._ready or (len(kept) < self.prompts_per_rollout and draws < self.objective.sampling.max_draws):
            draw, self._ready = self._ready or self._draw(number), None
            draws += 1
            drawn += draw.groups
            errors += draw.errors
            kept += self._varied(draw.groups)
            seconds += draw.seconds
            if hasattr(self.objective.sampling, "observe_groups"):
                rates = [(group.rows[0].prompt_id, group.pass_rate) for group in draw.groups]
                self.objective.sampling.observe_groups(rates)
        tokens = sum(row.length for group in drawn for row in group.rows)
        if len(kept) < self.prompts_per_rollout:
            log.warning(
                "rollout %d: %d of %d groups have varied rewards after sampling.max_draws=%d; training on those",
                number, len(kept), self.prompts_per_rollout, draws,
            )  # fmt: skip
        groups, surplus = kept[: self.prompts_per_rollout], kept[self.prompts_per_rollout :]
        self.surplus = surplus if self.objective.sampling.keep_surplus else []
        for status, members in (("dropped", drawn), ("kept for the next rollout", self.surplus), ("trained", groups)):
            for group in members:
                for row in group.rows:
                    row.record |= {"status": status, "staleness": number - group.weights_rollout}
        with self.clock("score"):
            self._finish(groups, self.surplus)
        metrics = rollout_metrics(drawn or groups)
        metrics["sampling/draws"] = draws
        metrics["sampling/groups"] = len(groups)
        metrics["sampling/groups_reused"] = min(reused, len(groups))
        metrics["sampling/groups_kept_for_next"] = len(self.surplus)
        staleness = [number - group.weights_rollout for group in groups]
        metrics["rollout/staleness_mean"] = sum(staleness) / len(staleness) if staleness else math.nan
        metrics["rollout/staleness_max"] = max(staleness, default=math.nan)
        metrics["speed/generated_tokens_per_s"] = tokens / seconds if seconds else math.nan
        return Rollout(number, groups, drawn, metrics, tokens, errors)

    def start_ahead(self, number: int) -> None:
        """Begin to generate the first draw of rollout `number`, with the weights that the engine has now."""
        prompts, requests = self._requests(number)
        started = time.perf_counter()
        mine = own_part(self.engine, requests)
        completions = self.engine.submit(mine, self.sampling)  # type: ignore[attr-defined]
        self._ahead = Ahead(number, prompts, completions, started)
        completions.add_done_callback(self._ahead.end)

    def finish_ahead(self) -> None:
        """Wait for what `start_ahead` began, score it, and make it the next rollout's first draw."""
        if self._ahead is None:
            return
        ahead, self._ahead = self._ahead, None
        with self.clock("generate"):
            completions = of_all(self.engine, ahead.completions.result())
        seconds = (ahead.ended or time.perf_counter()) - ahead.started
        with self.clock("score"):
            draw = self._score(ahead.prompts, completions, ahead.number, ahead.number - 1, seconds)
            rows = [row for group in draw.groups for row in group.rows]
            with (
                self.kept_weights()
            ):  # the policy has moved on, but the importance ratio is to the weights that sampled
                self._score_policy(rows, old_logp=True)
        self._ready = draw

    def _requests(self, number: int) -> tuple[list[tuple[int, Prompt]], list[Request]]:
        choose = getattr(self.objective.sampling, "choose", None)
        prompts = self.stream.draw(self.prompts_per_rollout, choose)
        return prompts, [
            Request(prompt.token_ids, (self.seed, TRAIN_STREAM, number, draw_index), self.group_size)
            for draw_index, prompt in prompts
        ]

    def _draw(self, number: int) -> Draw:
        prompts, requests = self._requests(number)
        own, columns = share(prompts), columns_of([prompt for _, prompt in prompts])

        def batch_of(groups: Groups) -> RewardBatch:
            return self._batch([(*own[at], completions) for at, completions in groups], columns, number)

        scorer = EagerScorer(self.engine, self.rewards, batch_of)
        started = time.perf_counter()
        with self.clock("generate"):
            completions = of_all(self.engine, scorer.generate(own_part(self.engine, requests), self.sampling))
        seconds = time.perf_counter() - started
        with self.clock("score"):
            return self._score(prompts, completions, number, number, seconds, scorer)

    def _score(
        self,
        prompts: list[tuple[int, Prompt]],
        completed: list[list[Completion]],
        number: int,
        weights_rollout: int,
        seconds: float,
        scorer: EagerScorer | None = None,
    ) -> Draw:
        everything = [(index, prompt, group) for (index, prompt), group in zip(prompts, completed, strict=True)]
        sampled = share(everything)  # each process scores a part of the groups
        batch = self._batch(sampled, columns_of([prompt for _, prompt in prompts]), number)
        result = self.rewards(batch, gather, scorer.verdicts(len(sampled)) if scorer else None)
        groups, at = [], 0
        for index, prompt, completions in sampled:
            span = slice(at, at + len(completions))
            at = span.stop
            rows = [make_row(prompt, completion, index) for completion in completions]
            components = {name: values[span] for name, values in result.components.items()}
            for k, row in enumerate(rows):
                row.record = {
                    "prompt": prompt.text,
                    "completion": batch.completions[span][k],
                    "rewards": {name: _number(values[k]) for name, values in components.items()},
                    "reward": _number(result.total[span][k]),
                    "correct": result.correct[span][k],
                    "advantage": None,
                    "length": row.length,
                    "finish_reason": completions[k].finish_reason,
                    "group_id": index,
                    "prompt_id": prompt.prompt_id,
                    "weights_version": row.weights_version,
                    "answer": prompt.answer,
                }
                if result.steps is not None:
                    row.record["steps"] = [[step.end, step.reward] for step in result.steps[span][k] or []]
            groups.append(
                Group(
                    rows=rows,
                    task_rewards=torch.tensor(result.total[span], dtype=torch.float64),
                    components={k: torch.tensor(v, dtype=torch.float64) for k, v in components.items()},
                    correct=result.correct[span],
                    truncated=torch.tensor([c.finish_reason == "length" for c in completions]),
                    rollout=number,
                    weights_rollout=weights_rollout,
                    steps=[
                        step_positions(row.token_ids[row.start :].tolist(), steps or [], self.decode)
                        for row, steps in zip(rows, (result.steps or [None] * len(batch))[span], strict=True)
                    ],
                )
            )
        errors = [message for messages in gather(result.errors) for message in messages]
        return Draw(join(groups), errors, seconds)

    def _batch(
        self, sampled: list[tuple[int, Prompt, list[Completion]]], columns: list[str], number: int
    ) -> RewardBatch:
        flat = [(index, prompt, c, k) for index, prompt, cs in sampled for k, c in enumerate(cs)]
        return reward_batch(
            [prompt for _, prompt, _, _ in flat],
            [completion for _, _, completion, _ in flat],
            group_ids=[index for index, _, _, _ in flat],
            keys=[(self.seed, TRAIN_STREAM, number, index, k) for index, _, _, k in flat],
            decode=self.decode,
            columns=columns,
        )

    def _varied(self, groups: list[Group]) -> list[Group]:
        """The groups that `sampling` keeps, by their task rewards (before any shaping)."""
        rewards = torch.cat([group.task_rewards for group in groups])
        group_ids = torch.tensor([row.group_id for group in groups for row in group.rows])
        keep = self.objective.sampling.keep(rewards, group_ids)
        return [group for group in groups if group.rows[0].group_id in keep]

    def _finish(self, groups: list[Group], surplus: list[Group]) -> None:
        """Old and reference log-probabilities, advantages and loss masks of the rollout, on whole groups."""
        rows = [row for group in groups for row in group.rows]
        # A group kept for the next rollout needs its old_logp now, while the weights that sampled it are at hand.
        late = [row for group in surplus for row in group.rows]
        self._score_policy(late, old_logp=True)
        self._score_policy(rows, old_logp=self.needs_old_logp or self.objective.kl_in_reward)
        if not rows:
            return
        if self.objective.needs_reference:
            unreferenced = [row for row in rows if row.ref_logp is None]
            with self.clock("logps"):
                referenced = self.score(unreferenced, True)
            for row, scores in zip(unreferenced, referenced, strict=True):
                row.ref_logp = scores.logp
        width = max(row.length for row in rows)
        mask = pad_completions([torch.ones(row.length, dtype=torch.bool) for row in rows], width, False)
        task_rewards = torch.cat([group.task_rewards for group in groups])
        truncated = torch.cat([group.truncated for group in groups])
        lengths = torch.tensor([row.length for row in rows])
        rewards = self.objective.shaped_rewards(task_rewards, lengths, truncated)
        if self.objective.needs("correct"):  # a row without a verdict is neither right nor wrong: it is left out
            unjudged = torch.tensor([value is None for group in groups for value in group.correct])
            rewards = rewards.masked_fill(unjudged, math.nan)
        kl_penalty = None
        if self.objective.kl_in_reward:
            old = pad_completions([_present(row.old_logp) for row in rows], width)
            ref = pad_completions([_present(row.ref_logp) for row in rows], width)
            kl_penalty = self.objective.kl_penalty(old, ref, mask)
        group_ids = torch.tensor([row.group_id for row in rows])
        correct = torch.tensor([value is True for group in groups for value in group.correct])
        step_rewards = step_ends = None
        if self.rewards.judges_steps:
            step_rewards, step_ends = pad_steps([steps for group in groups for steps in group.steps])
        values = None
        if self.has_critic:
            values = pad_completions([_present(row.values) for row in rows], width)
            returns = self.objective.returns(rewards, mask, values, kl_penalty=kl_penalty)
            for row, value in zip(rows, returns, strict=True):
                row.returns = value[: row.length].float()
        advantages = self._advantages(
            rewards,
            group_ids,
            mask,
            kl_penalty=kl_penalty,
            correct=correct,
            components={n: torch.cat([group.components[n] for group in groups]) for n in groups[0].components},
            component_weights={name: component.weight for name, component in self.rewards.components.items()},
            step_rewards=step_rewards,
            step_ends=step_ends,
            entropy=pad_completions([_present(row.entropy) for row in rows], width) if self._takes_entropy else None,
            prompt_ids=torch.tensor([row.prompt_id for row in rows]),
            values=values,
        )
        keep = self.objective.keep_rows(rewards, truncated, group_ids, correct=correct)
        for row, advantage, shaped, kept in zip(rows, advantages, rewards.tolist(), keep.tolist(), strict=True):
            row.advantage = advantage[: row.length].float()
            row.record["shaped_reward"] = _number(shaped)
            row.record["advantage"] = float(row.advantage.mean())
            if not kept:
                row.record["status"] = "out of the loss"
            row.loss_mask = torch.arange(len(row.token_ids)) >= row.start if kept else torch.zeros_like(row.loss_mask)

    def _advantages(self, *args: Any, **keywords: Any) -> Tensor:
        try:
            return self.objective.advantages(*args, **keywords)
        except ValueError as error:  # rewards that this advantage cannot take, say
            raise RunError(str(error)) from error

    def _score_policy(self, rows: list[Row], *, old_logp: bool) -> None:
        """Fill in what the weights that sampled the rows say of them, where it is needed and still missing."""
        if self.old_logp == "sampler":
            for row in rows:
                row.old_logp = row.sampler_logp
        takes_entropy = self._takes_entropy
        missing = [
            row
            for row in rows
            if (old_logp and row.old_logp is None)
            or (takes_entropy and row.entropy is None)
            or (self.has_critic and row.values is None)
        ]
        if not missing:
            return
        with self.clock("logps"):
            scored = self.score(missing, False)
        for row, scores in zip(missing, scored, strict=True):
            if old_logp and row.old_logp is None:
                row.old_logp = scores.logp
            row.entropy = scores.entropy if takes_entropy else None
            row.values = scores.values

    @property
    def _takes_entropy(self) -> bool:
        return self.objective.takes("entropy")

    def state_dict(self) -> dict[str, Any]:
        self.finish_ahead()  # a draw that is under way is part of what a resumed run goes on with
        return {"stream": self.stream.state_dict(), "surplus": self.surplus, "ready": self._ready}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state["stream"])
        self.surplus, self._ready = state["surplus"], state["ready"]


def _present(value: Tensor | None) -> Tensor:
    if value is None:
        raise RuntimeError("a row reached the advantages without what the policy that sampled it says of it")
    return value


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
