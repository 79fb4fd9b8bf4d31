"""sampling=frontier: prompts near the edge of what the policy can do are drawn more often."""

import json
import math
from collections import Counter

import pytest
import torch

from grpo_lightning.data.prompts import Prompt, PromptStream
from grpo_lightning.objective import load_objective
from grpo_lightning.objective.sampling import SampleFrontier

IDS = [10, 11, 12, 13]


def frontier(floor=0.2, rate=0.5, **rates):
    sampling = SampleFrontier(floor, rate)
    sampling.pass_rates = {int(name[1:]): value for name, value in rates.items()}
    return sampling


def test_single_draws_have_the_chances_of_the_formula():
    # w = 4 p (1 - p): 1 unseen, 0 at p = 0, 0.75 at p = 1/4, 0 at p = 1; 0.2 / 4 + 0.8 w / 1.75
    sampling = frontier(p11=0.0, p12=0.25, p13=1.0)
    drawn = Counter(sampling.choose(IDS, 1, (0, k))[0] for k in range(20_000))
    for place, weight in enumerate((1, 0, 0.75, 0)):
        chance = 0.05 + 0.8 * weight / 1.75
        assert drawn[place] / 20_000 == pytest.approx(chance, abs=4 * math.sqrt(chance / 20_000))


def test_a_draw_has_no_prompt_twice_and_depends_on_its_key_alone():
    sampling = frontier(p11=0.5)
    for key in ((0, 0), (0, 3), (1, 3)):
        places = sampling.choose(IDS, 3, key)
        assert len(set(places)) == 3 and places == frontier(p11=0.5).choose(IDS, 3, key)
    assert sorted(sampling.choose(IDS, 4, (7, 7))) == [0, 1, 2, 3]
    assert len({tuple(sampling.choose(IDS, 3, (0, k))) for k in range(30)}) > 5
    everything_known = frontier(p10=1.0, p11=0.0, p12=1.0, p13=0.0)  # no frontier left: uniform
    counts = Counter(everything_known.choose(IDS, 1, (0, k))[0] for k in range(4000))
    assert min(counts.values()) > 850


def test_the_running_pass_rate():
    sampling = frontier(rate=0.75)
    sampling.observe_groups([(10, 0.5), (11, math.nan)])
    assert sampling.pass_rates == {10: 0.5}
    sampling.observe_groups([(10, 1.0), (12, 0.0)])
    assert sampling.pass_rates == {10: 0.625, 12: 0.0}
    again = frontier()
    again.load_state_dict(json.loads(json.dumps(sampling.state_dict()), object_hook=_ints))
    assert again.pass_rates == sampling.pass_rates


def _ints(node):
    return {int(k) if k.isdigit() else k: v for k, v in node.items()}


def test_the_stream_draws_what_was_chosen_and_counts_on():
    prompts = [Prompt(i, f"p{i}", (1,), None, {}) for i in IDS]
    stream, keys = PromptStream(prompts, 5), []

    def choose(ids, n, key):
        keys.append(key)
        return [2, 0][:n]

    drawn = stream.draw(2, choose) + stream.draw(1, choose)
    assert [(index, prompt.prompt_id) for index, prompt in drawn] == [(0, 12), (1, 10), (2, 12)]
    assert keys == [(5, 0), (5, 2)]


def test_the_objective_saves_it():
    objective = load_objective(["sampling=frontier"])
    objective.sampling.observe_groups([(3, 0.25)])
    state = objective.state_dict()
    again = load_objective(["sampling=frontier"])
    again.load_state_dict(state)
    objective.sampling.observe_groups([(3, 1.0)])
    assert again.sampling.pass_rates == {3: 0.25}
    assert objective.sampling.keep(torch.tensor([1.0, 1.0]), torch.tensor([4, 4])) == {4}


@pytest.mark.parametrize(("name", "value", "interval"), [("floor", 0, "(0, 1]"), ("rate", 1, "[0, 1)")])
def test_wrong_values(name, value, interval):
    with pytest.raises(ValueError) as error:
        load_objective(["sampling=frontier", f"sampling.{name}={value}"])
    assert str(error.value) == f"sampling.{name} must be in {interval}, got {value}"
