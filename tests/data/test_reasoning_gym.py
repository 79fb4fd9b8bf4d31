import sys

import pytest

pytest.importorskip("reasoning_gym")

from grpo_lightning.data.reasoning_gym import ReasoningGym
from grpo_lightning.errors import RunError, UsageError
from grpo_lightning.reward import RewardBatch, RewardSet
from grpo_lightning.reward.exact import Exact
from grpo_lightning.reward.reasoning_gym import ReasoningGymScore


def test_the_split_is_the_same_for_every_run_and_disjoint():
    small = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # repeats itself
    data = ReasoningGym("chain_sum", small, size=400)
    train, held_out = data.load(20)
    assert not {item.prompt for item in train} & {item.prompt for item in held_out}
    assert len(held_out) == 20 and data.duplicates == 400 - 20 - len(train) > 0
    assert ReasoningGym("chain_sum", small, size=400).load(20) == (train, held_out)
    assert ReasoningGym("chain_sum", small, size=400, seed=1).load(20) != (train, held_out)


@pytest.mark.parametrize("task", ["chain_sum", "spell_backward", "basic_arithmetic", "letter_counting"])
def test_the_tasks_own_answer_scores_one(task):
    train, _ = ReasoningGym(task, size=12).load(2)
    n = len(train)
    columns = {name: [item.columns[name] for item in train] for name in train[0].columns}
    for form in ("{}", "<think>no</think>So <answer>{}</answer>", "The answer is {}."):
        completions = [form.format(item.answer) for item in train]
        batch = RewardBatch(["q"] * n, completions, [item.answer for item in train], columns)
        rewards = RewardSet({"gym": ReasoningGymScore(), "exact": Exact()})
        assert rewards(batch).components == {"gym": [1.0] * n, "exact": [1.0] * n}
        assert rewards(batch).correct == [True] * n


def test_wrong_answers_and_endless_thinking():
    item = ReasoningGym("chain_sum", size=4).load(1)[0][0]
    entries = {"entry": [item.columns["entry"]] * 2}
    rows = RewardBatch(["q"] * 2, ["<answer>x</answer>", f"<think>{item.answer}"], ["1"] * 2, entries)
    assert ReasoningGymScore()(rows) == [0.0, 0.0]
    partial = ReasoningGymScore(partial_credit=True)(rows)
    assert partial[0] < 0.1 and partial[1] == 0.0


def test_partial_credit_only_where_asked_for():
    item = ReasoningGym("chain_sum", size=4).load(1)[0][0]
    rows = RewardBatch(
        ["q"] * 2, [f"{item.answer}", f"{item.answer} or 7"], [item.answer] * 2, {"entry": [item.columns["entry"]] * 2}
    )
    partial = ReasoningGymScore(partial_credit=True)(rows)
    assert partial[0] == 1 and 0 < partial[1] < 1  # pays for an answer that merely contains the right one
    assert ReasoningGymScore()(rows) == [1.0, 0.0]
    with pytest.raises(UsageError, match=r"reward\.reasoning_gym\.partial_credit must be true or false"):
        ReasoningGymScore(partial_credit="yes")


def test_other_data_is_refused():
    with pytest.raises(UsageError, match="reward=reasoning_gym scores only data=reasoning_gym"):
        RewardSet({"gym": ReasoningGymScore()})(RewardBatch(["q"], ["c"], ["a"]))
    with pytest.raises(RunError, match=r"reward\.gym: row 0: KeyError"):
        RewardSet({"gym": ReasoningGymScore()})(RewardBatch(["q"], ["c"], ["a"], {"entry": [{}]}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "chain_sm"}, r"data\.task=chain_sm: .*did you mean chain_sum"),
        ({"task": "zzz"}, r"data\.task=zzz: .*there are: .*chain_sum"),
        ({"task_config": {"max_term": 3}}, r"data\.task_config\.max_term is no option.*max_terms"),
        ({"task_config": {"size": 3}}, r"data\.task_config\.size is no option"),
        ({"task_config": {"min_terms": -1}}, "the task chain_sum refuses its options: min_terms must be positive"),
        ({"task_config": [1]}, r"data\.task_config must be a mapping"),
        ({"size": 0}, r"data\.size must be a whole number from 1"),
        ({"seed": "a"}, r"data\.seed must be a whole number from 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UsageError, match=message):
        ReasoningGym(**options)


def test_too_few_different_questions():
    with pytest.raises(UsageError, match=r"eval\.prompts=30, but the data has 20 different prompts"):
        ReasoningGym(size=20).load(30)


def test_the_package_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UsageError, match="pip install reasoning-gym"):
        ReasoningGym()
