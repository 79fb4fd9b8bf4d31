"""The optimiser step: invariant to how the minibatch is cut, ratios, reference policy, nothing to train on."""

import math

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from grpo_lightning.errors import RunError
from grpo_lightning.logps import Traits
from grpo_lightning.model import load_policy
from grpo_lightning.module import GRPOModule
from grpo_lightning.objective import load_objective
from grpo_lightning.objective.silent import silent_without_advantage
from grpo_lightning.rollout.buffer import RolloutBuffer, Row
from tests.models import llama

LENGTHS = [(3, 4), (3, 9), (5, 2), (5, 1), (2, 6), (2, 7)]  # prompt and completion tokens; two rows a group
REWARDS = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]


def make_rows(seed: int = 0, scored_by: torch.nn.Module | None = None) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number, (prompt, completion) in enumerate(LENGTHS):
        ids = torch.randint(3, 11, (prompt + completion,), generator=generator)
        if number % 2:
            ids[:prompt] = rows[-1].token_ids[:prompt]
        sign = 2 * REWARDS[number] - 1
        rows.append(
            Row(
                token_ids=ids, loss_mask=torch.arange(len(ids)) >= prompt, start=prompt, group_id=number // 2,
                prompt_id=number // 2, sampler_logp=torch.zeros(completion), weights_version=0,
                advantage=torch.full((completion,), sign),
            )
        )  # fmt: skip
    return rows


class Fill(L.Callback):
    """Fills the buffer with fixed rows, as a rollout would."""

    def __init__(self, rows: list[Row], needs_old: bool = False) -> None:
        self.rows, self.needs_old = rows, needs_old
        self.metrics: list[dict[str, float]] = []

    def on_train_epoch_start(self, trainer, pl_module):
        if pl_module.reference is not None:
            for row, logp in zip(self.rows, [s.logp for s in pl_module.score(self.rows, True)], strict=True):
                row.ref_logp = logp
        if self.needs_old:
            for row, logp in zip(self.rows, [s.logp for s in pl_module.score(self.rows, False)], strict=True):
                row.old_logp = logp
        pl_module.buffer.fill(self.rows, trainer.current_epoch + 1)

    def on_train_batch_end(self, trainer, pl_module, *_):
        if pl_module.step_metrics:
            self.metrics.append(pl_module.step_metrics)


def fit(rows: list[Row], overrides: list[str], tmp_path, **options) -> tuple[GRPOModule, Fill]:
    buffer = RolloutBuffer(options.pop("epochs", 1), options.pop("minibatches", 1), seed=0)
    lr, rollouts = options.pop("lr", 0.1), options.pop("rollouts", 1)
    make_fill = options.pop("fill", None)
    reference = llama(1) if options.pop("reference", False) else None
    module = GRPOModule(
        options.pop("policy", None) or llama(0),
        load_objective(overrides),
        buffer,
        options.pop("optimizer", None) or (lambda parameters: torch.optim.SGD(parameters, lr=lr)),
        reference=reference,
        **({"max_grad_norm": None} | options),
    )
    fill = make_fill(rows) if make_fill else Fill(rows, needs_old=len(buffer) > 1)
    trainer = L.Trainer(
        max_epochs=rollouts, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, callbacks=[fill],
        default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, DataLoader(range(len(buffer)), batch_size=None))
    return module, fill


OBJECTIVES = [
    (["algorithm=grpo"], True),
    (["algorithm=dapo", "overlong.max_length=20"], False),
    (["algorithm=dr_grpo", "loss_norm.length=9"], False),
    (["algorithm=gspo"], False),
    (["algorithm=rloo"], False),
    (["loss_norm=prompt", "kl=k2"], True),
]


@pytest.mark.parametrize("overrides,reference", OBJECTIVES)
def test_the_step_does_not_depend_on_micro_batches_row_order_or_shared_prompts(overrides, reference, tmp_path):
    steps = []
    for budget, order, share in ((10_000, 1, False), (10_000, 1, True), (30, 1, True), (1, 1, True), (30, -1, False)):
        rows = make_rows()[::order]
        module, fill = fit(
            rows, overrides, tmp_path, reference=reference, micro_batch_tokens=budget, share_prompts=share
        )
        steps.append((torch.cat([p.detach().flatten() for p in module.policy.parameters()]), fill.metrics[0]))
    start = torch.cat([p.detach().flatten() for p in llama(0).parameters()])
    moved = steps[0][0] - start
    assert moved.abs().max() > 1e-4
    for parameters, metrics in steps[1:]:
        torch.testing.assert_close(parameters - start, moved, rtol=0, atol=1e-5 * float(moved.abs().max()))
        for name, value in steps[0][1].items():
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True), name


@pytest.mark.parametrize("overrides,reference", [(["algorithm=grpo"], True), (["algorithm=dr_grpo"], False)])
def test_everything_that_saves_time_changes_neither_loss_nor_gradient(overrides, reference, tmp_path):
    """On: shared prompts, silent rows left out, hidden states cut before a readout in parts, micro-batches by length.
    Off: every row on its own, through the model's own logits."""
    steps = []
    for on in (True, False):
        rows = make_rows()
        rows[4].advantage = torch.zeros(rows[4].length)
        module = GRPOModule(
            load_policy("tiny"),
            load_objective([*overrides, "loss_norm=constant", "loss_norm.length=9"]),
            RolloutBuffer(1, 1, seed=0), lambda parameters: torch.optim.SGD(parameters, lr=0.1), max_grad_norm=None,
            reference=load_policy("tiny") if reference else None, temperature=0.8, share_prompts=on,
            skip_silent="all" if on else "none",
            micro_batch_tokens=40 if on else 1,
        )  # fmt: skip
        if not on:
            module.traits = Traits(plain_output=False, attention=None)
        fill = Moved(rows)
        trainer = L.Trainer(
            max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[fill], default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, DataLoader(range(1), batch_size=None))
        steps.append((fill.metrics[0], torch.cat([p.grad.flatten() for p in module.policy.parameters()])))
    (metrics, gradient), (plain_metrics, plain_gradient) = steps
    assert plain_gradient.norm() > 0
    assert float((gradient - plain_gradient).norm() / plain_gradient.norm()) < 1e-5
    assert metrics["policy/loss"] == pytest.approx(plain_metrics["policy/loss"], rel=1e-5)


class Moved(Fill):
    """Reference policy and old policy are not quite the policy, so that no term of the loss is zero."""

    def on_train_epoch_start(self, trainer, pl_module):
        with torch.no_grad():
            generator = torch.Generator().manual_seed(1)
            for parameter in pl_module.policy.parameters():
                parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
        super().on_train_epoch_start(trainer, pl_module)
        for row in self.rows:
            row.old_logp = torch.full((row.length,), -2.5)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("silent", [[0, 1], [3], [0, 1, 2, 3, 4, 5]])
def test_rows_without_a_loss_are_left_out_and_denominators_stay(silent, share, tmp_path, monkeypatch):
    steps, forwarded = [], []

    def forward(self, batch, original=GRPOModule._forward, **keywords):
        forwarded.append((len(batch.mask), torch.is_grad_enabled()))
        return original(self, batch, **keywords)

    monkeypatch.setattr(GRPOModule, "_forward", forward)
    for skip in ("none", "backward", "all"):
        forwarded.clear()
        rows = make_rows()
        for index in silent:
            rows[index].advantage = torch.zeros(rows[index].length)
        rows[2].loss_mask = torch.zeros_like(rows[2].loss_mask)  # a row out of the loss is in no pass
        options = dict(skip_silent=skip, share_prompts=share, micro_batch_tokens=40)
        module, fill = fit(rows, ["kl=none", "loss_norm=token"], tmp_path, **options)
        learnt, seen = (sum(count for count, learns in forwarded if learns == kind) for kind in (True, False))
        expected = len({0, 1, 3, 4, 5} - set(silent)) or 1
        assert (learnt, seen) == {"none": (6, 0), "backward": (expected, 5 - expected), "all": (expected, 0)}[skip]
        steps.append((torch.cat([p.detach().flatten() for p in module.policy.parameters()]), fill.metrics[0]))
    moved = steps[0][0] - torch.cat([p.detach().flatten() for p in llama(0).parameters()])
    assert bool(moved.any()) == (len(silent) < 6)
    for parameters, metrics in steps[1:]:
        torch.testing.assert_close(parameters, steps[0][0], rtol=0, atol=1e-5 * float(moved.abs().max()) + 1e-12)
        for name in ("policy/loss", "policy/grad_norm", "update/tokens"):
            assert metrics[name] == pytest.approx(steps[0][1][name], rel=1e-5, abs=1e-7), name
    for name, value in steps[0][1].items():  # with a forward pass for them all, nothing that is measured changes
        assert steps[1][1][name] == pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True), name
    entropy = [metrics["policy/entropy"] for _, metrics in steps]
    assert entropy[2] != pytest.approx(entropy[0], rel=1e-4)


def test_momentum_moves_the_policy_as_before_where_every_row_is_silent(tmp_path):
    moved = []
    for skip in ("none", "backward", "all"):
        rows, silent = make_rows(), make_rows()
        for row in silent:
            row.advantage = torch.zeros(row.length)
        make = lambda _: FillInTurn([rows, silent])  # noqa: B023, E731
        adam = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)  # noqa: E731
        module, fill = fit(rows, ["kl=none"], tmp_path, rollouts=2, skip_silent=skip, fill=make, optimizer=adam)
        assert len(fill.metrics) == 2 and fill.metrics[1]["policy/grad_norm"] == 0
        moved.append(torch.cat([p.detach().flatten() for p in module.policy.parameters()]))
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(moved[2], moved[0], rtol=1e-6, atol=1e-7)


class FillInTurn(Fill):
    """Other rows in each rollout."""

    def __init__(self, rollouts: list[list[Row]]) -> None:
        super().__init__(rollouts[0])
        self.rollouts = iter(rollouts)

    def on_train_epoch_start(self, trainer, pl_module):
        self.rows = next(self.rollouts)
        super().on_train_epoch_start(trainer, pl_module)


@pytest.mark.parametrize(
    "overrides,silent",
    [
        (["kl=none"], True), (["algorithm=dapo", "overlong.max_length=9"], True), (["algorithm=dr_grpo"], True),
        (["algorithm=gspo"], True), (["algorithm=cispo"], True), (["algorithm=gmpo"], True),
        (["clip=none", "kl=none"], True),
        (["algorithm=sapo"], True), (["algorithm=dcpo"], True), (["algorithm=abc"], True), (["kl=k1_reward"], True),
        (["kl=k3"], False), (["kl=none", "entropy=bonus"], False), (["kl=none", "entropy=top"], False),
        (["kl=none", "entropy=kl_cov"], False), (["kl=none", "clip._target_=tests.test_module.Always"], False),
    ],
)  # fmt: skip
def test_which_objectives_are_silent_without_an_advantage(overrides, silent):
    assert silent_without_advantage(load_objective(overrides)) == silent


class Always:
    """A clip of a user's own whose loss has nothing to do with the advantage."""

    def __init__(self, epsilon: float = 0.2):
        self.epsilon = epsilon

    def __call__(self, ratio, advantages, logp):
        return self.epsilon * logp.square()


def test_a_small_step_raises_the_advantage_weighted_log_probability_by_lr_times_the_squared_gradient(tmp_path):
    # First order: J = mean_i A_i mean_t logp moves by lr * |grad|^2 under plain gradient ascent.
    lr = 1e-5
    module, fill = fit(make_rows(), ["kl=none"], tmp_path, lr=lr)
    start = GRPOModule(llama(0), module.objective, module.buffer, torch.optim.SGD)
    start.trainer = module.trainer
    rows = make_rows()
    change = [
        float(((new - old) * row.advantage).mean())
        for row, old, new in zip(
            rows, [s.logp for s in start.score(rows, False)], [s.logp for s in module.score(rows, False)], strict=True
        )
    ]
    assert sum(change) / len(rows) == pytest.approx(lr * fill.metrics[0]["policy/grad_norm"] ** 2, rel=0.05)


def test_the_ratio_is_one_in_the_first_step_and_not_in_the_second(tmp_path):
    _, once = fit(make_rows(), ["kl=none"], tmp_path)
    assert once.metrics[0]["policy/ratio_max"] == 1.0
    module, twice = fit(make_rows(), ["kl=none"], tmp_path, epochs=2)
    assert len(twice.metrics) == 2 and module.trainer.global_step == 2  # P83: one count per optimiser step
    assert twice.metrics[0]["policy/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert twice.metrics[1]["policy/ratio_max"] > 1.01


class FillSomeOld(Fill):
    """Half of the rows carry a stored old_logp, as groups kept from the rollout before do."""

    def __init__(self, rows: list[Row], shift: float) -> None:
        super().__init__(rows)
        self.shift = shift

    def on_train_epoch_start(self, trainer, pl_module):
        for row, logp in list(zip(self.rows, [s.logp for s in pl_module.score(self.rows, False)], strict=True))[:3]:
            row.old_logp = logp - self.shift
        super().on_train_epoch_start(trainer, pl_module)


def test_kept_rows_keep_their_old_policy_beside_fresh_ones(tmp_path):
    # Stored old_logp = logp - log 2: ratio 2 on those rows' 4 + 9 + 2 tokens, exactly 1 on the other 1 + 6 + 7.
    _, fill = fit(make_rows(), ["kl=none"], tmp_path, fill=lambda rows: FillSomeOld(rows, math.log(2.0)))
    assert fill.metrics[0]["ratio/mean"] == pytest.approx((2 * 15 + 14) / 29, rel=1e-5)
    assert fill.metrics[0]["policy/ratio_max"] == pytest.approx(2.0, rel=1e-5)


def test_kl_is_zero_at_the_start_and_the_reference_stays(tmp_path):
    policy = llama(1)  # the same weights as the reference of `fit`
    module, fill = fit(make_rows(), ["kl=k3"], tmp_path, policy=policy, reference=True, rollouts=2)
    assert fill.metrics[0]["policy/kl"] == pytest.approx(0.0, abs=1e-9)
    assert fill.metrics[1]["policy/kl"] > 1e-5
    for kept, original in zip(module.reference.parameters(), llama(1).parameters(), strict=True):
        assert torch.equal(kept, original) and not kept.requires_grad
    assert all(name.startswith("policy.") for name in module.state_dict())


def test_no_loss_token_means_no_step_even_with_momentum(tmp_path):
    # T10, P05: all truncated and filtered: no parameter changes.
    rows = make_rows()
    for row in rows:
        row.loss_mask = torch.zeros_like(row.loss_mask)
    module, fill = fit(rows, ["kl=none"], tmp_path)
    assert fill.metrics == [] and module.trainer.global_step == 0
    for now, before in zip(module.policy.parameters(), llama(0).parameters(), strict=True):
        assert torch.equal(now, before)


def test_minibatches_take_one_step_each_and_an_empty_rollout_none(tmp_path):
    module, fill = fit(make_rows(), ["kl=none"], tmp_path, minibatches=3, epochs=2)
    assert module.trainer.global_step == 6
    assert sum(m["update/tokens"] for m in fill.metrics) == 2 * sum(c for _, c in LENGTHS)
    module, fill = fit([], ["kl=none"], tmp_path)
    assert module.trainer.global_step == 0


def test_the_gradient_norm_is_reported_before_clipping_and_clipped(tmp_path):
    _, free = fit(make_rows(), ["kl=none"], tmp_path)
    clipped_module, clipped = fit(make_rows(), ["kl=none"], tmp_path, max_grad_norm=0.01, lr=1.0)
    assert clipped.metrics[0]["policy/grad_norm"] == pytest.approx(free.metrics[0]["policy/grad_norm"])
    moved = [n - o for n, o in zip(clipped_module.policy.parameters(), llama(0).parameters(), strict=True)]
    assert float(torch.cat([m.flatten() for m in moved]).norm()) == pytest.approx(0.01, rel=1e-3)


def test_warm_up_is_counted_in_rollouts(tmp_path):
    _, fill = fit(make_rows(), ["kl=none"], tmp_path, warmup_rollouts=4, rollouts=6, minibatches=3, lr=0.004)
    rates = [m["optimizer/lr"] for m in fill.metrics]
    assert rates == pytest.approx([0.001] * 3 + [0.002] * 3 + [0.003] * 3 + [0.004] * 9)


def test_a_gradient_that_is_not_finite_ends_the_run_before_the_step(tmp_path):
    rows = make_rows()
    policy = llama(0)
    policy.lm_head.weight.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(RunError, match="gradient norm is nan at step 0"):
        fit(rows, ["kl=none"], tmp_path, policy=policy)
