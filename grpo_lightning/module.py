"""GRPOModule: owns the policy and the frozen reference policy, and takes the optimiser steps."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from grpo_lightning.clock import PhaseClock
from grpo_lightning.critic import Critic
from grpo_lightning.distributed import gather, local, rank, shard, unshare, whole, world_size
from grpo_lightning.errors import RunError
from grpo_lightning.logps import TokenLogps, examine, token_logps
from grpo_lightning.lora import has_adapters, is_adapter_weight, without_adapters
from grpo_lightning.objective import Objective
from grpo_lightning.objective.silent import silent_without_advantage
from grpo_lightning.rollout.batch import Batch, collate, loss_masks, pad_completions
from grpo_lightning.rollout.buffer import RolloutBuffer, Row, Scores
from grpo_lightning.rollout.micro_batches import MicroBatch, cut_for, without_loss
from grpo_lightning.sums import Sums


class GRPOModule(L.LightningModule):
    """One `training_step` is one optimiser step on one minibatch of the rollout buffer.

    The loss is `objective.loss` summed over micro-batches that share the weights of the whole minibatch, so the
    gradient does not depend on how the minibatch is cut. Optimisation is manual; the loader yields minibatch numbers.

    Args:
        policy: a causal language model in float32. reference: the frozen reference policy, or None at kl=none. It is
            held outside the module tree, so that it is in no checkpoint and gets no gradient. None where the policy has
            adapters: its reference is the policy itself with the adapters switched off.
        optimizer: parameter groups -> torch optimiser, at the full learning rate.
        temperature: of the sampling; logits are divided by it.
        micro_batch_tokens: the most padded tokens in one forward and backward pass.
        share_prompts: compute a prompt once for the rows that have it, where the model can and where it pays.
        skip_silent: what rows whose loss is exactly zero are left out of: "none", the "backward" pass, or "all", the
            forward pass too; denominators count them as before.
        max_grad_norm: clip the gradient's 2-norm to it; None or inf leaves it.
        warmup_rollouts: the learning rate rises linearly over this many rollouts.
        old_logp: "trainer", or "sampler" where the rows bring the engine's log-probabilities as old_logp.
        critic: gives the values that the advantages are made of, and is trained beside the policy.
        reference_every: the reference policy follows the policy at the first rollout end after every so many optimiser
            steps: reference = reference_mix * policy + (1 - reference_mix) * reference. None: it stays as it is.
    """

    def __init__(
        self,
        policy: nn.Module,
        objective: Objective,
        buffer: RolloutBuffer,
        optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer],
        *,
        reference: nn.Module | None = None,
        temperature: float = 1.0,
        micro_batch_tokens: int = 8192,
        share_prompts: bool = True,
        skip_silent: str = "backward",
        max_grad_norm: float | None = 1.0,
        warmup_rollouts: int = 0,
        old_logp: str = "trainer",
        critic: Critic | None = None,
        reference_every: int | None = None,
        reference_mix: float = 1.0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy = policy.train()  # dropout is off in either mode; gradient checkpointing wants this one
        self.objective = objective
        self.buffer = buffer
        self.optimizer_factory = optimizer
        self.temperature = temperature
        self.micro_batch_tokens = micro_batch_tokens
        self.max_grad_norm = math.inf if max_grad_norm is None else max_grad_norm
        self.warmup_rollouts = warmup_rollouts
        if reference is not None:
            reference.requires_grad_(False).eval()
        self._reference = (reference,)  # in a tuple, which torch does not look into
        self.strict_loading = not has_adapters(policy)  # see on_save_checkpoint
        self.old_logp = old_logp
        self.critic = critic
        self.traits = examine(policy)
        self.attention = self.traits.attention if share_prompts else None
        self.skip_silent = skip_silent
        self.silent_without_advantage = critic is None and silent_without_advantage(objective)
        self.reference_every, self.reference_mix = reference_every, reference_mix
        self._reference_updates = 0
        self._steps: list[dict[str, float]] = []  # what the steps of this rollout measured
        self._kept: list[Tensor] = []
        self.clock = PhaseClock()
        self.tokens_trained = 0
        self.rollout_tokens_trained = 0
        # What the newest optimiser step and the newest rollout measured; the Recorder writes them down.
        self.step_metrics: dict[str, float] = {}
        self.rollout_metrics: dict[str, float] = {}

    @property
    def reference(self) -> nn.Module | None:
        """The frozen reference policy, where it is a model of its own."""
        return self._reference[0]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [{"params": self._trained()}]
        if self.critic is not None:
            own = {"params": list(self.critic.parameters())}
            groups.append(own if self.critic.lr is None else own | {"lr": self.critic.lr})
        optimizer = self.optimizer_factory(groups)
        self._options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        return optimizer

    def configure_model(self) -> None:
        """With trainer=fsdp, shard policy and reference policy over the processes, layer by layer (FSDP2)."""
        strategy = self.trainer.strategy
        if isinstance(strategy, ModelParallelStrategy):
            for model in (self.policy, self.reference):
                if model is not None:
                    shard(model, strategy.device_mesh["data_parallel"], self.trainer.precision)

    def on_train_start(self) -> None:
        # A checkpoint brings its own learning rate and the like along; what this run was configured with counts.
        for group, options in zip(self._optimizer().param_groups, self._options, strict=True):
            group.update(options)

    def on_fit_start(self) -> None:
        if self.reference is not None:
            self.reference.to(self.device)

    def on_train_epoch_start(self) -> None:
        self.rollout_tokens_trained, self._steps = 0, []
        # Derived from the rollout's number, so that nothing about the schedule has to be saved.
        warmup = min(1.0, (self.current_epoch + 1) / self.warmup_rollouts) if self.warmup_rollouts else 1.0
        for group, options in zip(self._optimizer().param_groups, self._options, strict=True):
            group["lr"] = options["lr"] * warmup

    def training_step(self, number: Tensor, batch_idx: int) -> None:
        rows = self.buffer.minibatch(int(number))
        self.step_metrics = {}
        # Nothing to train on: an optimiser step on a zero gradient would still move the parameters by its momentum.
        if any(bool(row.loss_mask.any()) for row in rows):
            with self.clock("update"):
                self._step(rows, first=int(number) == 0)

    def _step(self, rows: list[Row], first: bool) -> None:
        optimizer = self._optimizer()
        optimizer.zero_grad()
        metrics = self._backward(rows, first)
        norm = float(whole(nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)))
        if self.critic is not None:
            critic_norm = float(nn.utils.clip_grad_norm_(self.critic.parameters(), self.max_grad_norm))
            metrics["critic/grad_norm"] = critic_norm
            norm = norm if math.isfinite(critic_norm) else critic_norm
        if not math.isfinite(norm):
            raise RunError(
                f"the gradient norm is {norm} at step {self.global_step}: no step was taken; "
                "lower optimizer.lr or look at the rewards of the last rollout"
            )
        with self.clock.part("optimizer"):
            optimizer.step()
        tokens = sum(int(row.loss_mask.sum()) for row in rows)
        self.tokens_trained += tokens
        self.rollout_tokens_trained += tokens
        self.step_metrics = {
            "policy/loss": metrics.pop("policy/loss"),
            "policy/grad_norm": norm,
            "optimizer/lr": optimizer.param_groups[0]["lr"],
            "update/tokens": tokens,
            **metrics,
            **self.objective.adapted,
        }
        self._steps.append({**self.step_metrics, "rows": sum(bool(row.loss_mask.any()) for row in rows)})

    def end_rollout(self) -> None:
        """Once per rollout, after its last step: parts of the objective adapt, the reference policy follows."""
        if not self._steps:
            return
        names = self._steps[0].keys() - {"rows"}
        tokens = sum(step["update/tokens"] for step in self._steps)
        mean = {name: sum(step[name] * step["update/tokens"] for step in self._steps) / tokens for name in names}
        self.objective.observe(mean, int(sum(step["rows"] for step in self._steps)) // self.buffer.epochs)
        if self.reference_every and self.global_step // self.reference_every > self._reference_updates:
            self._reference_updates = self.global_step // self.reference_every
            self._follow()

    @torch.no_grad()
    def _follow(self) -> None:
        if self.reference is None:
            raise RuntimeError("there is no reference policy of its own that could follow the policy")
        for theirs, ours in zip(self.reference.parameters(), self.policy.parameters(), strict=True):
            theirs.lerp_(ours.to(theirs.dtype), self.reference_mix)

    def _backward(self, rows: list[Row], first: bool) -> dict[str, float]:
        """Accumulate the gradient of one minibatch, the rows of all processes; returns its loss and metrics."""
        mask, group_ids = loss_masks(rows)
        weights = self.objective.weights(mask, group_ids)  # of the whole minibatch, before it is cut
        selected = self._select(rows) if self.objective.selects else None
        tokens_in_all = max(1, int(mask.sum()))
        sums = Sums()
        micro_batches, learning = self._passes(rows)
        for number, (indices, packs, counts) in enumerate(micro_batches):
            learns = number < learning
            batch = collate([rows[i] for i in indices], packs).to(self.device)
            with self.clock.part("forward"), torch.set_grad_enabled(learns):
                (logp, entropy, _), values = self._forward(batch, entropy_gradient=self.objective.entropy_gradient)
            # Where the current weights sampled the row, the old policy is this very policy: the ratio is exactly 1.
            old_logp = logp.detach()
            if batch.old_logp is not None:
                old_logp = torch.where(batch.fresh.unsqueeze(1), old_logp, batch.old_logp)
            if batch.advantages is None:
                raise RuntimeError("a row reached the loss without an advantage")
            out = self.objective.loss(
                logp,
                old_logp,
                batch.advantages,
                batch.mask,
                batch.group_ids,
                ref_logp=batch.ref_logp,
                weights=(weights[indices, : batch.mask.shape[1]] * counts).float().to(self.device),
                sampler_logp=batch.sampler_logp,
                entropy=entropy,
                selected=None if selected is None else selected[indices, : batch.mask.shape[1]].to(self.device),
            )
            loss = out.loss
            more: dict[str, tuple[Tensor, Tensor]] = {}
            if values is not None:
                value_loss, more = self._value_loss(values, batch, tokens_in_all, counts)
                loss = loss + value_loss
            if learns:
                with self._gradients_kept_back(last=number == learning - 1), self.clock.part("backward"):
                    self.manual_backward(loss * world_size())  # gradients are averaged over processes
            # How far the engine's log-probabilities are from the trainer's at the weights that sampled. Where the
            # engine's serve as old_logp, the trainer has those of these weights before the rollout's first step only.
            trainer_logp = old_logp if self.old_logp == "trainer" else logp.detach()
            gap = (trainer_logp - batch.sampler_logp).abs().where(batch.mask, 0)
            tokens = batch.mask.sum()
            known = self.old_logp == "trainer" or first
            metrics = (
                dict(out.metrics)
                | more
                | {
                    "policy/entropy": (entropy.detach().where(batch.mask, 0).sum(), tokens),
                    "sampler/logp_gap_mean": (gap.sum(), tokens * known),
                }
            )
            gap_max = gap.max() if known else torch.tensor(math.nan)
            sums.take(out.loss.detach(), metrics, {**out.maxima, "sampler/logp_gap_max": gap_max}, counts)
        return sums.over_processes(self.device)

    def _cut(self, rows: Sequence[Row], some: Sequence[int]) -> list[MicroBatch]:
        """The micro-batches of this process from some of the rows, whose indices are given."""
        batches = cut_for([rows[i] for i in some], self.micro_batch_tokens, rank(), world_size(), self.attention)
        return [batch._replace(rows=[some[i] for i in batch.rows]) for batch in batches]

    def _passes(self, rows: list[Row]) -> tuple[list[MicroBatch], int]:
        """The micro-batches of this process, as indices into `rows`, and how many of them, from the first, learn."""
        heard, silent = list(range(len(rows))), list[int]()
        if self.skip_silent != "none":
            heard, silent = without_loss(rows, self.silent_without_advantage)
        learning = self._cut(rows, heard)
        return learning + (self._cut(rows, silent) if self.skip_silent == "backward" else []), len(learning)

    def _forward(self, batch: Batch, *, entropy_gradient: bool = False) -> tuple[TokenLogps, Tensor | None]:
        """What the policy as it is now says of a batch and, with a critic, the values [N, T]."""
        out = token_logps(self.policy, batch, self.temperature, self.traits, entropy_gradient=entropy_gradient)
        return out, None if self.critic is None else self.critic.values(batch, self.policy, out.hidden)

    def _value_loss(
        self, values: Tensor, batch: Batch, tokens: int, counts: bool
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        assert self.critic is not None
        if batch.values is None or batch.returns is None:
            raise RuntimeError("a row reached the value loss without the values and returns of its rollout")
        loss = self.critic.loss(values, batch.values, batch.returns, batch.mask, tokens) * counts
        error = (values.detach() - batch.returns).square().where(batch.mask, 0)
        return loss, {"critic/error": (error.sum(), batch.mask.sum())}

    def _select(self, rows: list[Row]) -> Tensor:
        """The tokens [N, T] of a whole minibatch that the objective singles out, from a pass before the step."""
        scores = self.score(rows, False)
        mask, _ = loss_masks(rows)
        width = mask.shape[1]
        advantages = [torch.zeros(row.length) if row.advantage is None else row.advantage for row in rows]
        return self.objective.select(
            pad_completions([score.logp for score in scores], width),
            pad_completions(advantages, width),
            mask,
            entropy=pad_completions([score.entropy for score in scores], width),
            step=self.global_step,
        )

    @contextmanager
    def _gradients_kept_back(self, last: bool) -> Iterator[None]:
        """Where each process holds the whole gradient, it is averaged once a step, with the last micro-batch."""
        model = self.trainer.strategy.model
        with nullcontext() if last or not isinstance(model, DistributedDataParallel) else model.no_sync():
            yield

    @torch.no_grad()
    def score(self, rows: Sequence[Row], reference: bool) -> list[Scores]:
        """What the policy as it is now, with its critic, or the reference says of each row."""
        model = self.reference if reference and self.reference is not None else self.policy
        adapters_off = reference and self.reference is None
        if adapters_off and not has_adapters(self.policy):
            raise RuntimeError("there is no reference policy: the objective has kl=none")
        result: dict[int, Scores] = {}
        for indices, packs, _ in self._cut(rows, range(len(rows))):
            batch = collate([rows[i] for i in indices], packs).to(self.device)
            adapters = without_adapters(model) if adapters_off else nullcontext()
            with self.trainer.precision_plugin.forward_context(), adapters:
                values = None
                if reference:
                    logp, entropy, _ = token_logps(model, batch, self.temperature, self.traits)
                else:
                    (logp, entropy, _), values = self._forward(batch)
            for place, index in enumerate(indices):
                own = (place, slice(rows[index].length))
                result[index] = Scores(
                    logp[own].cpu().clone(),
                    entropy[own].cpu().clone(),
                    None if values is None else values[own].cpu().clone(),
                )
        # Each process has scored rows of its own. A row that only filled up is scored by the process that has it, too:
        # the first one's word counts everywhere.
        everyones: dict[int, Scores] = {}
        for scored in gather(result):
            everyones = scored | everyones
        return [everyones[index] for index in range(len(rows))]

    def keep_weights(self) -> None:
        """Remember the policy's weights as they are now, for `kept_weights`; one more copy of them, on the CPU."""
        unshare(self.policy)
        self._kept = [local(parameter).detach().to("cpu", copy=True) for parameter in self._sampled_with()]

    @contextmanager
    def kept_weights(self) -> Iterator[None]:
        """A context in which the policy has the weights that `keep_weights` remembered."""
        self._exchange_weights()
        try:
            yield
        finally:
            self._exchange_weights()

    @torch.no_grad()
    def _exchange_weights(self) -> None:
        unshare(self.policy)
        for number, parameter in enumerate(self._sampled_with()):
            now = local(parameter).detach().to("cpu", copy=True)
            local(parameter).copy_(self._kept[number])
            self._kept[number] = now

    def _sampled_with(self) -> list[nn.Parameter]:
        """The weights that say what a rollout's rows were sampled and valued with."""
        return [*self._trained(), *(self.critic.parameters() if self.critic is not None else ())]

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.policy.parameters() if parameter.requires_grad]

    def _optimizer(self) -> LightningOptimizer:
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        return optimizer

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["tokens_trained"], checkpoint["seconds"] = self.tokens_trained, dict(self.clock.total)
        checkpoint["objective"] = self.objective.state_dict()
        if has_adapters(self.policy):  # the model they were put into never changes: model.path has it
            weights = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: weights[name] for name in weights if _changes(name)}
        checkpoint["reference_updates"] = self._reference_updates
        # Not where only the state beside the weights is taken.
        if self.reference_every and self.reference is not None and "optimizer_states" in checkpoint:
            checkpoint["reference"] = self.reference.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if not self.strict_loading and "state_dict" in checkpoint:  # with trainer=fsdp it has been loaded already
            adapters = {name for name in self.state_dict() if _changes(name)}
            if checkpoint["state_dict"].keys() != adapters:
                raise RunError("the checkpoint does not hold the adapters that model.lora describes")
        self.tokens_trained = checkpoint["tokens_trained"]
        self._reference_updates = checkpoint["reference_updates"]
        if self.reference_every and self.reference is not None:
            self.reference.load_state_dict(checkpoint["reference"])
        self.objective.load_state_dict(checkpoint["objective"])
        for phase, seconds in checkpoint["seconds"].items():
            self.clock.total[phase] += seconds


def _changes(name: str) -> bool:
    """Whether a name of the state dict is that of a weight which training changes where the policy has adapters."""
    return is_adapter_weight(name) or name.startswith("critic.")
