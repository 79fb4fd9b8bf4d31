"""The objective: one part per group, put together into one loss.

loss = sum_{i,t} w_{i,t} * ( c_{i,t} * surrogate_{i,t} - coef * H_{i,t} + beta * kl_{i,t} )
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from torch import Tensor

from grpo_lightning.objective.build import build_part
from grpo_lightning.objective.checks import call, check_finite, check_keywords, check_mask, check_shape, keywords
from grpo_lightning.objective.correction import sampler_ratio
from grpo_lightning.objective.groups import group_index, per_token
from grpo_lightning.objective.kl import K3, MAX_LOG_RATIO
from grpo_lightning.objective.pairs import named, refusals, trait, warnings

GROUPS = ("advantage", "ratio", "clip", "kl", "loss_norm", "overlong", "sampling", "correction", "entropy")


class LossOutput(NamedTuple):
    """loss: scalar with a graph. metrics: name -> (sum, count), to be added up over micro-batches and ranks and then
    divided. maxima: name -> largest value, to be combined by max. Metrics and maxima are detached."""

    loss: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]]
    maxima: dict[str, Tensor]


def _clean(name: str, values: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` [N, T] in `dtype`, checked to be finite under the mask, 0 elsewhere (in the gradient too)."""
    check_shape(name, values, mask.shape)
    check_finite(name, values, mask)
    return values.to(dtype).where(mask, 0)


@dataclass(frozen=True)
class Objective:
    """One option of every group. Composing options that cannot work together raises ValueError naming both.

    N rows, T completion positions. Log-probabilities and advantages are [N, T]; what is not under the mask is ignored.
    Computation is in float32, or float64 where `logp` (for advantages `rewards`) is float64. `notes` go to `warnings`.
    """

    advantage: Any
    ratio: Any
    clip: Any
    kl: Any
    loss_norm: Any
    overlong: Any
    sampling: Any
    correction: Any
    entropy: Any
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if lines := refusals(self._parts()):
            raise ValueError("; ".join(lines))

    @classmethod
    def from_config(cls, cfg: Any) -> "Objective":
        """Build the part of every group from `cfg`, a DictConfig or dict with a `_target_` under each group's name.

        Raises ValueError naming the option: a missing group, a class that cannot be found or does not take a value,
        a value out of its range, options that cannot be combined.
        """
        cfg = OmegaConf.create(cfg) if isinstance(cfg, dict) else cfg
        built = {group: build_part(group, cfg.get(group)) for group in GROUPS}
        notes = tuple(line for _, lines in built.values() for line in lines)
        return cls(**{group: part for group, (part, _) in built.items()}, notes=notes)

    def _parts(self) -> dict[str, Any]:
        return {group: getattr(self, group) for group in GROUPS}

    @property
    def warnings(self) -> list[str]:
        """What the composition does that its user may not expect, a line each."""
        return [*self.notes, *warnings(self._parts())]

    @property
    def needs_reference(self) -> bool:
        """Whether the reference policy must be loaded."""
        return bool(trait(self.kl, "needs_reference"))

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL is taken off the rewards instead of being a term of the loss."""
        return bool(trait(self.kl, "in_reward"))

    def takes(self, keyword: str) -> bool:
        """Whether the advantage takes `keyword`, e.g. "values" or "entropy"."""
        return keyword in keywords(self.advantage)

    @property
    def selects(self) -> bool:
        """Whether tokens are selected over the whole minibatch, before it is cut: see `select`."""
        return hasattr(self.entropy, "select")

    @property
    def entropy_gradient(self) -> bool:
        """Whether the entropy is a term of the loss, so that `loss` must be given it with its graph."""
        return bool(trait(self.entropy, "differentiates"))

    def needs(self, keyword: str) -> bool:
        """Whether some part must be given `keyword`, e.g. "sampler_logp" or "correct"."""
        calls = [part for part in self._parts().values() if callable(part)]
        calls += [self.advantage.keep] if hasattr(self.advantage, "keep") else []
        return any(keywords(each).get(keyword, False) for each in calls)

    def check_group_size(self, group_size: int) -> None:
        """Raise ValueError where a group of one completion cannot give a signal."""
        if group_size > 1:
            return
        if trait(self.advantage, "group_baseline"):
            option = named("advantage", self.advantage)
            raise ValueError(f"{option} compares the completions of a group: rollout.group_size must be at least 2")
        if trait(self.sampling, "name") == "dynamic":
            raise ValueError("sampling=dynamic keeps groups of unequal rewards: rollout.group_size must be at least 2")

    def shaped_rewards(self, task_rewards: Tensor, lengths: Tensor, truncated: Tensor) -> Tensor:
        """Task rewards [N] (NaN: none) plus the overlong punishment; lengths [N] in tokens, truncated [N] bool."""
        check_shape("lengths", lengths, task_rewards.shape)
        check_shape("truncated", truncated, task_rewards.shape)
        return (task_rewards + self.overlong(lengths)).to(task_rewards.dtype)

    def keep_rows(
        self, rewards: Tensor, truncated: Tensor, group_ids: Tensor | None = None, *, correct: Tensor | None = None
    ) -> Tensor:
        """Which rows stay in the loss [N] bool: those with a reward that neither overlong filtering nor an advantage
        which rejects rows (raft) takes out. rewards [N], truncated [N] bool, group_ids [N] int, correct [N] bool."""
        there = ~torch.isnan(rewards)
        if trait(self.overlong, "drop_truncated"):
            there = there & ~truncated
        if hasattr(self.advantage, "keep"):
            if group_ids is None:
                raise ValueError(f"{named('advantage', self.advantage)} needs `group_ids`, which was not given")
            option = named("advantage", self.advantage)
            there = there & call(option, self.advantage.keep, rewards, group_ids, correct=correct)
        return there

    def kl_penalty(self, old_logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
        """beta * kl(old, ref) [N, T], detached, 0 off the mask: what kl.in_reward takes off the rewards."""
        dtype = _working_dtype(old_logp)
        old, ref = _clean("old_logp", old_logp, mask, dtype), _clean("ref_logp", ref_logp, mask, dtype)
        return (trait(self.kl, "beta") * self._kl(old, ref, torch.zeros_like(old))).detach()

    def _kl(self, logp: Tensor, ref_logp: Tensor, log_ratio: Tensor) -> Tensor:
        kl = self.kl if self.needs_reference else K3(beta=0.0)
        return call(named("kl", self.kl), kl, logp, ref_logp, log_ratio=log_ratio)

    def advantages(
        self,
        rewards: Tensor,
        group_ids: Tensor,
        mask: Tensor,
        *,
        correct: Tensor | None = None,
        components: Mapping[str, Tensor] | None = None,
        component_weights: Mapping[str, float] | None = None,
        kl_penalty: Tensor | None = None,
        step_rewards: Tensor | None = None,
        step_ends: Tensor | None = None,
        entropy: Tensor | None = None,
        prompt_ids: Tensor | None = None,
        values: Tensor | None = None,
    ) -> Tensor:
        """Advantages [N, T] of one whole rollout (all ranks); 0 off the mask and in rows without a reward.

        rewards [N] float, NaN where there is none; group_ids [N] int in any order; mask [N, T] bool: all completion
        tokens. The keywords reach the options that take them. `kl_penalty` [N, T], from the method of that name, is
        needed exactly with kl.in_reward=true: options that do not take it token by token see r_i - sum_t kl_penalty.

        correct [N] bool; components {name: [N]}, unweighted scores, with component_weights {name: float};
        step_rewards [N, S] float (NaN: no such step) with step_ends [N, S] int, the position of each step's last token;
        entropy [N, T] of the old policy; prompt_ids [N] int; values [N, T] of the critic.
        """
        check_mask(mask)
        check_shape("rewards", rewards, mask.shape[:1])
        check_shape("group_ids", group_ids, mask.shape[:1])
        dtype = _working_dtype(rewards)
        rewards = rewards.detach().to(dtype)
        if torch.isinf(rewards).any():
            raise ValueError(f"the reward of row {int(torch.isinf(rewards).nonzero()[0])} is infinite")
        if trait(self.advantage, "group_baseline"):
            _check_groups(named("advantage", self.advantage), group_ids)
        if self.kl_in_reward != (kl_penalty is not None):
            raise ValueError("`kl_penalty` must be given exactly when kl.in_reward is true")
        if kl_penalty is not None:
            kl_penalty = _clean("kl_penalty", kl_penalty.detach(), mask, dtype)
            if "kl_penalty" not in keywords(self.advantage):
                rewards = rewards - kl_penalty.sum(dim=1)
        if entropy is not None:
            entropy = _clean("entropy", entropy.detach(), mask, dtype)
        if values is not None:
            values = _clean("values", values.detach(), mask, dtype)
        check_keywords(
            mask, correct=correct, components=components, step_rewards=step_rewards, step_ends=step_ends,
            prompt_ids=prompt_ids,
        )  # fmt: skip
        available = dict(
            correct=correct, components=components, component_weights=component_weights, kl_penalty=kl_penalty,
            step_rewards=step_rewards, step_ends=step_ends, entropy=entropy, prompt_ids=prompt_ids, values=values,
        )  # fmt: skip
        result = call(named("advantage", self.advantage), self.advantage, rewards, group_ids, mask, **available)
        check_shape(f"what {named('advantage', self.advantage)} gives", result, mask.shape)
        there = per_token(torch.ones_like(rewards), mask).bool() & ~torch.isnan(rewards)[:, None]
        return result.to(dtype).where(there, 0)

    def returns(
        self,
        rewards: Tensor,
        mask: Tensor,
        values: Tensor,
        *,
        kl_penalty: Tensor | None = None,
    ) -> Tensor:
        """What a critic should have said [N, T], 0 off the mask and in rows without a reward; as in `advantages`."""
        option = named("advantage", self.advantage)
        if not hasattr(self.advantage, "returns"):
            raise ValueError(f"{option} takes no values of a critic: use advantage=gae, or critic=none")
        dtype = _working_dtype(rewards)
        values = _clean("values", values.detach(), mask, dtype)
        if kl_penalty is not None:
            kl_penalty = _clean("kl_penalty", kl_penalty.detach(), mask, dtype)
        rewards = rewards.detach().to(dtype)
        result = call(option, self.advantage.returns, rewards, mask, values, kl_penalty=kl_penalty)
        return result.to(dtype).where(mask & ~torch.isnan(rewards)[:, None], 0)

    def weights(self, mask: Tensor, group_ids: Tensor) -> Tensor:
        """The weight w [N, T] (float64) of each token of one whole minibatch: all its micro-batches, all ranks.

        mask [N, T] bool: the loss tokens; group_ids [N] int. Rows of it, with their weights, may then be given to
        `loss` in any cut: the losses add up to the same.
        """
        check_mask(mask)
        check_shape("group_ids", group_ids, mask.shape[:1])
        return self.loss_norm(mask, group_ids)

    def select(
        self, logp: Tensor, advantages: Tensor, mask: Tensor, *, entropy: Tensor | None = None, step: int = 0
    ) -> Tensor:
        """The tokens [N, T] bool that `entropy` singles out in one whole minibatch, all its micro-batches and ranks.

        logp, entropy [N, T]: of the policy before the step; advantages [N, T]; step: number of the optimiser step, from
        which a random selection draws. For `loss` as `selected`, cut as the rows are.
        """
        check_mask(mask)
        dtype = _working_dtype(logp)
        logp, advantages = (_clean(n, v.detach(), mask, dtype) for n, v in (("logp", logp), ("advantages", advantages)))
        entropy = None if entropy is None else _clean("entropy", entropy.detach(), mask, dtype)
        option = named("entropy", self.entropy)
        return call(option, self.entropy.select, logp, advantages, mask, entropy=entropy, step=step) & mask

    def observe(self, measured: Mapping[str, float], completions: int) -> None:
        """Tell the parts that adapt themselves what a rollout's steps measured on average, once per rollout.

        measured: metric name -> mean; completions: how many were trained on.
        """
        for part in self._parts().values():
            if hasattr(part, "observe"):
                part.observe(measured, completions)

    @property
    def adapted(self) -> dict[str, float]:
        """The coefficients that change by `observe`, as they are now: "kl/beta", "entropy/coef"."""
        names = {"kl": "beta", "entropy": "coef"}
        parts = {group: getattr(self, group) for group in names}
        return {f"{g}/{names[g]}": float(getattr(p, names[g])) for g, p in parts.items() if hasattr(p, "observe")}

    def loss(
        self,
        logp: Tensor,
        old_logp: Tensor | None,
        advantages: Tensor,
        mask: Tensor,
        group_ids: Tensor,
        ref_logp: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        sampler_logp: Tensor | None = None,
        entropy: Tensor | None = None,
        selected: Tensor | None = None,
    ) -> LossOutput:
        """The loss of these rows, to be minimised; everything [N, T] but group_ids [N].

        logp: of the current policy, with its graph. old_logp: at the weights that sampled; None is detached `logp`.
        weights: from `weights` over the whole minibatch; None computes them from these rows.
        sampler_logp: of the engine, at sampling. With it there are metrics of the ratio exp(old_logp - sampler_logp).
        entropy: of the current policy, with its graph where it is a term of the loss.
        selected: bool, from `select` over the whole minibatch; None selects among these rows.
        Raises ValueError for a value under the mask that is not finite, naming tensor, row and position.
        """
        check_mask(mask)
        dtype = _working_dtype(logp)
        logp = _clean("logp", logp, mask, dtype)
        old = logp.detach() if old_logp is None else _clean("old_logp", old_logp.detach(), mask, dtype)
        advantages = _clean("advantages", advantages.detach(), mask, dtype)
        weights = self.weights(mask, group_ids) if weights is None else weights
        weights = _clean("weights", weights.detach(), mask, dtype)
        given = {"sampler_logp": sampler_logp, "entropy": entropy}
        others = {name: _clean(name, v, mask, dtype) for name, v in given.items() if v is not None}
        if self.selects:
            if selected is None:
                selected = self.select(logp, advantages, mask, entropy=entropy)
            check_shape("selected", selected, mask.shape)
        per_row = {group: trait(getattr(self, group), "per_row") for group in ("ratio", "clip")}
        for group in ("ratio", "clip"):
            if per_row[group]:
                _check_constant_rows(named(group, getattr(self, group)), advantages, mask)

        log_ratio = self.ratio(logp - old, mask)
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        clip, tokens = named("clip", self.clip), {"mask": mask, "old_logp": old}
        surrogate = call(clip, self.clip, ratio, advantages, logp, **tokens)
        correction = call(named("correction", self.correction), self.correction, old, mask, **others)
        token_losses = call(
            named("entropy", self.entropy), self.entropy, correction * surrogate, mask,
            **others, selected=selected, logp=logp, old_logp=old, ratio=ratio, advantages=advantages,
        )  # fmt: skip

        values = {"ratio/mean": ratio, "ratio/clamped_fraction": log_ratio.abs() > MAX_LOG_RATIO}
        metrics = {name: _mean(value, mask, per_row["ratio"]) for name, value in values.items()}
        if selected is not None:
            metrics["entropy/selected_fraction"] = _mean(selected, mask, False)
        if hasattr(self.clip, "clipped"):
            low, high = call(clip, self.clip.clipped, ratio, advantages, **tokens)
            metrics["clip/low_fraction"] = _mean(low, mask, any(per_row.values()))
            metrics["clip/high_fraction"] = _mean(high, mask, any(per_row.values()))
        maxima = {"policy/ratio_max": _largest(ratio, mask)}
        if "sampler_logp" in others:
            between = sampler_ratio(old, others["sampler_logp"], mask)
            metrics["sampler/ratio_mean"] = _mean(between, mask, False)
            maxima["sampler/ratio_max"] = _largest(between, mask)
        if hasattr(self.correction, "changed"):
            changed = call(named("correction", self.correction), self.correction.changed, old, mask, **others)
            metrics["correction/changed_fraction"] = _mean(changed, mask, trait(self.correction, "per_row"))
        if ref_logp is not None:
            ref = _clean("ref_logp", ref_logp.detach(), mask, dtype)
            kl = self._kl(logp, ref, logp - old)
            metrics["policy/kl"] = _mean(kl, mask, False)
            if not self.kl_in_reward:
                token_losses = token_losses + trait(self.kl, "beta") * kl
        elif self.needs_reference and not self.kl_in_reward:
            raise ValueError(f"{named('kl', self.kl)} needs `ref_logp`, which was not given")
        return LossOutput((weights * token_losses).sum(), metrics, maxima)

    def state_dict(self) -> dict[str, Any]:
        """The state of the parts that have one: group -> state."""
        return {group: part.state_dict() for group, part in self._parts().items() if hasattr(part, "state_dict")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give each part its state back; ValueError unless exactly the parts that have one find theirs."""
        stateful = {group: part for group, part in self._parts().items() if hasattr(part, "load_state_dict")}
        if stateful.keys() != state.keys():
            raise ValueError(f"the saved state is of {sorted(state)}, the parts with a state are {sorted(stateful)}")
        for group, part in stateful.items():
            part.load_state_dict(state[group])


def _working_dtype(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype is torch.float64 else torch.float32


def _check_groups(option: str, group_ids: Tensor) -> None:
    index, _ = group_index(group_ids)
    alone = torch.bincount(index)[index] == 1
    if alone.any():
        group = group_ids[alone][0].item()
        raise ValueError(f"{option} needs at least 2 completions in each group, group {group} has 1")


def _check_constant_rows(option: str, advantages: Tensor, mask: Tensor) -> None:
    highest = advantages.where(mask, -torch.inf).amax(dim=1) if mask.shape[1] else advantages.new_zeros(len(mask))
    lowest = advantages.where(mask, torch.inf).amin(dim=1) if mask.shape[1] else highest
    varied = highest > lowest
    if varied.any():
        row = int(varied.nonzero()[0])
        raise ValueError(f"{option} needs one advantage per row, that of row {row} varies within the row")


def _mean(values: Tensor, mask: Tensor, per_row: bool) -> tuple[Tensor, Tensor]:
    """(sum, count) of `values` [N, T], detached, over the mask's tokens or, for values constant in a row, its rows."""
    values = values.detach().to(torch.promote_types(values.dtype, torch.float32)).where(mask, 0)
    if not per_row:
        return values.sum(), mask.sum().to(values.dtype)
    return (values.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum(), mask.any(dim=1).sum().to(values.dtype)


def _largest(values: Tensor, mask: Tensor) -> Tensor:
    """The largest of `values` [N, T], all positive, over the mask's tokens, detached; 0 where there are none."""
    return values.detach().where(mask, 0).max() if mask.numel() else values.new_zeros(())
