"""The critic: values of the state before each token, its loss, how it learns, and that it is saved."""

import csv
import json
import math

import pytest
import torch

from grpo_lightning.critic import Critic
from grpo_lightning.logps import examine, token_logps
from grpo_lightning.rollout.batch import collate
from tests.models import llama
from tests.test_module import Fill, fit, make_rows

OPTIONS = dict(coef=0.5, lr=None, epsilon=None)
KINDS = ("head", "model")


def critic_of(kind: str, policy: torch.nn.Module, **changes) -> Critic:
    trunk = llama(0).base_model if kind == "model" else None
    critic = Critic(policy, trunk=trunk, **(OPTIONS | changes))
    torch.manual_seed(3)
    torch.nn.init.normal_(critic.head.weight)
    return critic


def values_of(critic, policy, rows):
    batch = collate(rows)
    hidden = token_logps(policy, batch, 1.0, examine(policy)).hidden
    return critic.values(batch, policy, hidden), batch.mask


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_of_the_state_before_the_token(kind):
    policy, rows = llama(0), make_rows()
    critic = critic_of(kind, policy)
    values, mask = values_of(critic, policy, rows)
    assert values.shape == mask.shape and values.dtype == torch.float32
    for row, mine in zip(rows, values, strict=True):
        # A trunk that begins as the policy does has its hidden states.
        hidden = policy.model(row.token_ids[None]).last_hidden_state[0]
        expected = critic.head(hidden[row.start - 1 : -1]).squeeze(-1)
        torch.testing.assert_close(mine[: row.length], expected, atol=1e-5, rtol=1e-5)
    # the token itself is not known yet: another last token leaves the values alone
    rows[1].token_ids[-1] = (rows[1].token_ids[-1] + 1) % 11
    torch.testing.assert_close(values_of(critic, policy, rows)[0], values)


def test_the_loss_by_hand():
    values, old = torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[0.0, 2.0, 0.0]])
    returns, mask = torch.tensor([[0.0, 3.0, 0.0]]), torch.tensor([[True, True, False]])
    policy = llama(0)
    plain = Critic(policy, coef=0.5, lr=None, epsilon=None)
    assert plain.loss(values, old, returns, mask, 4).item() == pytest.approx(0.5 * (1 + 1) / 2 / 4)
    # clipped to old +- 0.2: 0.2 and 2, so (0.2 - 0)^2 < 1 and 1 = 1: the larger counts
    clipped = Critic(policy, coef=0.5, lr=None, epsilon=0.2)
    assert clipped.loss(values, old, returns, mask, 4).item() == pytest.approx(0.5 * (1 + 1) / 2 / 4)
    # V = 1, old = 0, R = 2: (1 - 2)^2 = 1 < (0.2 - 2)^2 = 3.24
    two = torch.tensor([[2.0, 3.0, 0.0]])
    assert clipped.loss(values, old, two, mask, 4).item() == pytest.approx(0.5 * (3.24 + 1) / 2 / 4)


def test_it_begins_at_zero():
    critic = Critic(llama(0), **OPTIONS)
    assert values_of(critic, llama(0), make_rows())[0].abs().max() == 0


class Returns(Fill):
    """Gives every row what a rollout would: values and returns."""

    def on_train_epoch_start(self, trainer, pl_module):
        for number, (row, scores) in enumerate(zip(self.rows, pl_module.score(self.rows, False), strict=True)):
            row.values = scores.values
            row.returns = torch.full((row.length,), float(number % 2))
        super().on_train_epoch_start(trainer, pl_module)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_does_not_depend_on_micro_batches(kind, tmp_path):
    steps = []
    for budget in (10_000, 30, 1):
        policy = llama(0)
        critic = critic_of(kind, policy, epsilon=0.2)
        module, fill = fit(
            make_rows(), ["kl=none", "advantage=gae"], tmp_path, policy=policy, critic=critic, fill=Returns,
            micro_batch_tokens=budget,
        )  # fmt: skip
        parameters = torch.cat([p.detach().flatten() for p in module.parameters()])
        steps.append((parameters, fill.metrics[0]))
    start = llama(0)
    begun = torch.cat([p.detach().flatten() for p in [*start.parameters(), *critic_of(kind, start).parameters()]])
    moved = (steps[0][0] - begun).abs().max()
    assert moved > 1e-4
    for parameters, metrics in steps[1:]:
        torch.testing.assert_close(parameters, steps[0][0], rtol=0, atol=1e-5 * float(moved))
        assert metrics["critic/error"] == pytest.approx(steps[0][1]["critic/error"], rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_values_move_towards_the_returns(kind, tmp_path):
    policy = llama(0)
    critic = critic_of(kind, policy, lr=0.05)
    torch.nn.init.zeros_(critic.head.weight)
    _, fill = fit(
        make_rows(), ["kl=none", "advantage=gae"], tmp_path, policy=policy, critic=critic, fill=Returns, rollouts=30,
        lr=0.001,
    )  # fmt: skip
    errors = [metrics["critic/error"] for metrics in fill.metrics]
    assert errors[-1] < 0.7 * errors[0] and all(math.isfinite(metrics["critic/grad_norm"]) for metrics in fill.metrics)


def test_a_model_of_its_own_leaves_the_policy_alone(tmp_path):
    changed = {}
    for kind in KINDS:
        policy = llama(0)
        rows = make_rows()
        for row in rows:
            row.advantage = torch.zeros(row.length)
        critic = critic_of(kind, policy)
        fit(rows, ["kl=none", "advantage=gae"], tmp_path, policy=policy, critic=critic, fill=Returns)
        pairs = zip(policy.parameters(), llama(0).parameters(), strict=True)
        changed[kind] = any(not torch.equal(now, before) for now, before in pairs)
    assert changed == {"head": True, "model": False}


def _comparable(row):
    """Without times, and without the validation at the end of the part that came first."""
    return {k: v for k, v in row.items() if not k.startswith(("time/", "speed/", "val/"))}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_a_critic_resumes_as_if_it_had_never_stopped(command, toy, run_dir, kind):
    options = [*toy, "algorithm=ppo", f"critic={kind}", "update.epochs=2", "update.minibatches=2"]
    whole, parts = run_dir / "whole", run_dir / "parts"
    assert command(*options, "trainer.max_epochs=3", f"hydra.run.dir={whole}")[0] == 0
    assert command(*options, "trainer.max_epochs=1", f"hydra.run.dir={parts}")[0] == 0
    assert command(*options, "trainer.max_epochs=3", "resume=auto", f"hydra.run.dir={parts}")[0] == 0
    tables = [list(csv.DictReader((folder / "metrics.csv").open())) for folder in (whole, parts)]
    assert len(tables[0]) == 12 and "critic/error" in tables[0][0]
    for left, right in zip(*tables, strict=True):
        assert _comparable(left) == _comparable(right)
    assert json.loads((parts / "summary.json").read_text())["algorithm"]["critic"] == kind
    names = torch.load(parts / "checkpoints" / "rollout=000003.ckpt", weights_only=False)["state_dict"]
    assert any(name.startswith("critic.head") for name in names)
    # what is exported is the policy alone
    assert not any("critic" in path.name for path in (parts / "checkpoints" / "model").iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["critic=head"], "advantage=grpo takes no values of a critic: advantage=gae, or critic=none"),
        (["algorithm=ppo", "critic.coef=0"], "critic.coef must be in (0, inf), got 0"),
        (["algorithm=ppo", "critic.epsilon=-1"], "critic.epsilon must be in (0, inf), got -1"),
        (["algorithm=ppo", "trainer=fsdp", "trainer.devices=2"], "critic does not go with trainer=fsdp"),
        (["algorithm=ppo", "critic.size=3"], "critic.size: no such option"),
    ],
)
def test_what_is_refused(command, options, message, run_dir):
    code, _, err = command("trainer=cpu", *options, f"hydra.run.dir={run_dir}")
    assert code == 2 and message in err


def test_what_was_sampled_ahead_is_valued_by_the_critic_of_then(tmp_path):
    policy = llama(0)
    critic = critic_of("model", policy)
    module, _ = fit(make_rows(), ["kl=none", "advantage=gae"], tmp_path, policy=policy, critic=critic, fill=Returns)
    rows = make_rows()
    before = [scores.values for scores in module.score(rows, False)]
    module.keep_weights()
    with torch.no_grad():
        for parameter in module.critic.parameters():
            parameter.add_(0.1)
    after = [scores.values for scores in module.score(rows, False)]
    with module.kept_weights():
        kept = [scores.values for scores in module.score(rows, False)]
    for old, new, then in zip(before, after, kept, strict=True):
        assert torch.equal(old, then) and not torch.equal(old, new)
