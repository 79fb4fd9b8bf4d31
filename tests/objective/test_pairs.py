"""What the options of the family refuse, and what they say aloud."""

import pytest

from grpo_lightning.objective import load_objective
from tests.objective.options import OPTIONS

PER_TOKEN = ("process", "gtpo", "gae")
PER_ROW = ("ratio=sequence", "ratio=sequence_arithmetic", "clip=gmpo")


@pytest.mark.parametrize("name", PER_TOKEN)
@pytest.mark.parametrize("other", PER_ROW)
def test_one_number_per_row_needs_one_advantage_per_row(name, other):
    message = f"^{other} cannot be combined with advantage={name}, whose advantage varies within a row$"
    with pytest.raises(ValueError, match=message):
        load_objective([f"advantage={name}", other])
    load_objective([f"advantage={name}", "ratio=sequence_token"])  # of which the gradient is the token's


@pytest.mark.parametrize("other", PER_ROW)
def test_a_kl_folded_token_by_token_varies_within_a_row(other):
    with pytest.raises(ValueError, match=f"^{other} cannot be combined with advantage=reinforce_pp and kl.in_reward"):
        load_objective(["algorithm=reinforce_pp", other])
    load_objective(["algorithm=reinforce_pp", other, "kl=k2"])


@pytest.mark.parametrize("ratio", OPTIONS["ratio"][1:])
@pytest.mark.parametrize("clip", ["none", "gmpo", "dcpo"])
def test_what_needs_the_ratio_of_each_token(ratio, clip):
    with pytest.raises(ValueError, match=f"^ratio={ratio} cannot be combined with clip={clip}"):
        load_objective([f"ratio={ratio}", f"clip={clip}"])


@pytest.mark.parametrize("name", ["process", "raft", "gdpo", "maxrl"])
@pytest.mark.parametrize(
    ("overrides", "other"),
    [
        (["kl=k2", "kl.in_reward=true"], "kl=k2 and kl.in_reward=true"),
        (["overlong=soft"], "overlong=soft"),
        (["overlong=soft_filter"], "overlong=soft"),
    ],
)
def test_what_does_not_read_the_total_reward_refuses_what_changes_it(name, overrides, other):
    reason = "which makes rewards negative" if name == "maxrl" else "which changes a total reward that it does not read"
    with pytest.raises(ValueError, match=f"^advantage={name} cannot be combined with {other}, {reason}$"):
        load_objective([f"advantage={name}", *overrides])
    said = load_objective([f"advantage={name}", "overlong=filter", "kl=k2"]).warnings
    assert [line.split(" ")[0] for line in said] == ["advantage=process"] * (name == "process")


def test_all_reasons_are_given_at_once():
    with pytest.raises(ValueError) as error:
        load_objective(["algorithm=process", "ratio=sequence", "clip=none", "overlong=soft"])
    assert len(str(error.value).split("; ")) == 3


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["clip=gmpo", "loss_norm=token"], ["clip=gmpo with loss_norm=token: rows weigh by their length"]),
        (["ratio=sequence_arithmetic", "loss_norm=token"], ["ratio=sequence_arithmetic with loss_norm=token"]),
        (["ratio=sequence_token", "loss_norm=token"], []),
        (["algorithm=luspo"], []),
        (["algorithm=gmpo", "loss_norm=dcpo"], []),
        (["clip=gmpo", "correction=tis"], ["clip=gmpo with correction=tis: the tokens of a row share one surrogate"]),
        (["kl=k3_plus", "kl.in_reward=true"], ["kl=k3_plus with kl.in_reward=true is kl=k3"]),
        (["kl=k3_corrected", "kl.in_reward=true"], ["kl=k3_corrected with kl.in_reward=true is kl=k3"]),
        (["kl=adaptive", "kl.estimator=k1"], ["kl=k1 in the loss has zero expected gradient"]),
        (["kl=adaptive", "kl.estimator=k1", "kl.in_reward=true"], []),
        (["kl=k1_reward"], []),
        (["algorithm=gtpo"], ["advantage=gtpo normalises right and wrong completions apart"]),
        (["algorithm=gtpo", "advantage.together=true"], []),
        (["algorithm=process"], ["advantage=process learns from the rewards of steps alone"]),
        (
            ["advantage=gtpo", "advantage.together=true", "overlong=soft"],
            ["advantage=gtpo with overlong=soft: the rewards of wrong completions"],
        ),
        (
            ["advantage=grpo_s", "overlong=soft", "kl=k1_reward"],
            ["advantage=grpo_s with kl=k1 and kl.in_reward=true", "advantage=grpo_s with overlong=soft"],
        ),
    ],
)
def test_what_is_said_aloud(overrides, expected):
    lines = load_objective(overrides).warnings
    assert len(lines) == len(expected)
    assert all(line.startswith(start) for line, start in zip(lines, expected, strict=True))
