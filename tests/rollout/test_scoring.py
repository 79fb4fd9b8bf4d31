"""Rewards while generation goes on: the same as at the end, whatever finishes first, and its errors end the rollout."""

import dataclasses
import threading

import pytest

from grpo_lightning.errors import RunError, UsageError
from grpo_lightning.reward import RewardSet
from grpo_lightning.reward.code import Code
from grpo_lightning.reward.exact import Exact
from grpo_lightning.reward.function import Function
from grpo_lightning.reward.http import Http
from grpo_lightning.reward.length import Cosine
from grpo_lightning.reward.math import Math
from grpo_lightning.reward.noisy import Noisy
from grpo_lightning.reward.random import Random, uniform
from grpo_lightning.reward.score import Unscored
from grpo_lightning.rollout import scoring
from tests.rollout.test_collect import FakeEngine, collector


class Telling(FakeEngine):
    """Tells of its groups from the last to the first, after `before` each. `told`: how many."""

    def __init__(self, plan, before=lambda told: None):
        super().__init__(plan)
        self.before, self.told = before, 0

    def generate(self, requests, params, done=None):
        groups = super().generate(requests, params)
        for index in reversed(range(len(groups))):
            self.before(self.told)
            if done is not None:
                done(index, groups[index])
            self.told += 1
        return groups


@dataclasses.dataclass
class Judge:
    """What `of` says of a row; it remembers how many rows it was asked for at a time, and in which threads."""

    of: object
    by_row: bool = True
    weight: float = 1.0
    correctness: bool = True

    def __post_init__(self):
        self.sizes, self.threads = [], set()

    def __call__(self, batch):
        self.sizes.append(len(batch))
        self.threads.add(threading.current_thread().name)
        return [self.of(batch, i) for i in range(len(batch))]


def first_token(batch, i):
    return float(batch.completion_ids[i][0])


def random_number(batch, i):
    return uniform(0, batch.keys[i])


def faulty(batch, i):
    if batch.completion_ids[i][0] == 3:
        return Unscored("nobody there")
    return ValueError("odd") if batch.completion_ids[i][0] == 1 else 0.5


PLAN = [(1, 0, 3, 0), (0, 0, 0, 1), (1, 3, 0, 0)]


def collected(by_row, **options):
    judges = {name: Judge(of, by_row) for name, of in dict(a=first_token, b=random_number, c=faulty).items()}
    judges["whole"] = Judge(lambda batch, i: float(len(batch)), by_row=False, correctness=False)
    engine = Telling(lambda draw: PLAN[draw % 3], **options)
    made = collector(engine, rewards=RewardSet(judges))
    return made.collect(1), judges


def test_what_is_scored_meanwhile_is_what_is_scored_at_the_end():
    slow = threading.Event()
    early, judges = collected(True, before=lambda told: slow.wait(0.05))
    late, others = collected(False)
    assert early.records == late.records and early.errors == late.errors and len(early.errors) == 5
    assert [message.partition(": ")[2] for message in early.errors if "odd" in message] == [
        "row 0: ValueError: odd", "row 7: ValueError: odd", "row 8: ValueError: odd",
    ]  # fmt: skip
    early.metrics.pop("speed/generated_tokens_per_s"), late.metrics.pop("speed/generated_tokens_per_s")
    assert repr(early.metrics) == repr(late.metrics)
    assert len(judges["a"].sizes) > 1 and sum(judges["a"].sizes) == 12 and others["a"].sizes == [12]
    assert judges["whole"].sizes == [12]  # what may look at the whole batch still sees it


def test_a_group_is_scored_before_the_next_one_is_generated():
    scored = threading.Event()
    waits = []

    def of(batch, i):
        scored.set()
        return 1.0

    engine = Telling(lambda draw: (1, 0, 0, 1), before=lambda told: told == 1 and waits.append(scored.wait(10)))
    collector(engine, rewards=RewardSet({"a": Judge(of)})).collect(1)
    assert waits == [True]


def test_groups_that_finish_while_another_is_scored_are_scored_together():
    told = threading.Event()

    def of(batch, i):
        told.wait(10)
        return first_token(batch, i)

    engine = Telling(lambda draw: (1, 0, 0, 1))
    original = engine.generate

    def generate(requests, params, done=None):
        groups = original(requests, params, done)
        told.set()
        return groups

    engine.generate = generate
    judge = Judge(of)
    collector(engine, prompts=5, rewards=RewardSet({"a": judge})).collect(1)
    assert judge.sizes in ([4, 16], [20])


@pytest.mark.parametrize("error", [RunError("no"), UsageError("not so"), KeyboardInterrupt()])
def test_an_error_of_a_reward_ends_the_generation(error):
    raised = threading.Event()

    def of(batch, i):
        raised.set()
        raise error

    engine = Telling(lambda draw: (1, 0, 0, 1), before=lambda told: told and raised.wait(10) and scored_error())

    def scored_error():
        threading.Event().wait(0.05)  # until the thread has noted it

    before = threading.active_count()
    with pytest.raises(type(error)) as caught:
        collector(engine, prompts=8, rewards=RewardSet({"a": Judge(of)})).collect(1)
    assert caught.value is error and engine.told <= 2 and threading.active_count() == before


def test_an_error_after_the_last_group_is_raised_too():
    def of(batch, i):
        threading.Event().wait(0.05)
        raise RunError("late")

    with pytest.raises(RunError, match="late"):
        collector(Telling(lambda draw: (1, 0, 0, 1)), rewards=RewardSet({"a": Judge(of)})).collect(1)


def test_a_component_that_fails_on_every_row_of_all_parts_ends_the_run():
    def of(batch, i):
        raise ValueError("broken")

    with pytest.raises(RunError, match=r"reward.a: row 0: ValueError: broken \(and no other of the 12 rows"):
        collector(Telling(lambda draw: (1, 0, 0, 1)), rewards=RewardSet({"a": Judge(of)})).collect(1)


def test_an_engine_that_fails_leaves_no_thread():
    def fail(told):
        if told == 2:
            raise RunError("lost")

    before = threading.active_count()
    with pytest.raises(RunError, match="lost"):
        collector(Telling(lambda draw: (1, 0, 0, 1), fail), rewards=RewardSet({"a": Judge(first_token)})).collect(1)
    assert threading.active_count() == before


def test_a_shared_engine_of_several_processes_is_not_asked_to_tell(monkeypatch):
    judge = Judge(first_token)
    monkeypatch.setattr(scoring, "world_size", lambda: 2)
    engine = Telling(lambda draw: (1, 0, 0, 1))
    engine.shared = True
    collector(engine, rewards=RewardSet({"a": judge})).collect(1)
    assert judge.sizes == [12]
    engine.shared = False
    collector(engine, rewards=RewardSet({"a": judge})).collect(1)
    assert len(judge.sizes) > 1 and judge.sizes[1] < 12


def test_a_part_has_the_columns_of_all_prompts():
    seen = set()

    def of(batch, i):
        seen.add(tuple(batch.columns))
        return 1.0

    made = collector(Telling(lambda draw: (1, 0, 0, 1)), data=3, rewards=RewardSet({"a": Judge(of)}))
    made.stream.prompts[0] = dataclasses.replace(made.stream.prompts[0], columns={"test": "t"})
    made.collect(1)
    assert seen == {("source", "test")}


def test_which_rewards_are_asked_meanwhile():
    components = {
        "math": Math(), "code": Code(), "http": Http("http://127.0.0.1:1/"), "exact": Exact(), "random": Random(),
        "function": Function(first_token), "noisy": Noisy(Math()), "noise": Noisy(Exact()), "length": Cosine(Math(), 9),
    }  # fmt: skip
    # Not those that compute in Python, and not those that run in the calling thread or may look at a whole batch.
    assert RewardSet(components).by_row == ["math", "code", "http", "noisy", "length"]


def test_a_whole_run_writes_the_same_to_the_last_byte(command, toy, tmp_path, monkeypatch):
    asked = []
    original = Math.__call__
    monkeypatch.setattr(Math, "__call__", lambda self, batch: asked.append(len(batch)) or original(self, batch))
    run = [*toy, "rollout=hf", "rollout.engine._target_=tests.rollout.engines.GroupByGroup"]
    run += ["reward=[math,format]", "eval.every=1"]
    files, most = [], []
    for by_row in (True, False):
        monkeypatch.setattr(Math, "by_row", by_row)
        asked.clear()
        folder = tmp_path / str(by_row)
        assert command(*run, f"hydra.run.dir={folder}")[0] == 0
        names = ("rollouts/*", "validation/*", "checkpoints/model/*.safetensors")
        files.append({str(p.relative_to(folder)): p.read_bytes() for name in names for p in folder.glob(name)})
        most.append(len(asked))
    assert files[0] == files[1] and len(files[0]) == 3 + 4 + 1
    assert most[0] > most[1] == 3 + 2 * 4  # one call a rollout, two a validation: sampled and greedy
