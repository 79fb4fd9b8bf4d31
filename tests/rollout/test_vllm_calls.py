"""What the vLLM engine asks of vLLM, seen by a stand-in: mostly what only a GPU would show."""

import logging
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_lightning.errors import RunError, UsageError
from grpo_lightning.objective.load import compose
from grpo_lightning.rollout.engine import Request, SamplingParams
from grpo_lightning.rollout.vllm import VLLMEngine
from tests.models import llama

PARAMS = SamplingParams(2, 1.0, (2,))
REQUESTS = [Request((3, 4), (0, 0, 1, 0), 2)]


class StandIn:
    """`vllm.LLM` as far as the engine uses it; `calls` is what was asked of it, in order."""

    def __init__(self, calls: list[Any], **options: Any) -> None:
        if "nonsense" in options:
            raise TypeError("unexpected keyword argument 'nonsense'")
        self.calls, self.options, self.gives_up = calls, options, True
        self.weights: dict[str, torch.Tensor] = {}
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64))

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.calls.append(method)
        self.weights = {name: tensor.clone() for name, tensor in kwargs["weights_iterator"]}

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", *tags))

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        return self.gives_up

    def generate(self, prompts: list[Any], samplings: list[Any], use_tqdm: bool) -> list[Any]:
        self.calls.append("generate")
        logprobs = SimpleNamespace(token_ids=[5, 2], logprobs=[-1.0, -2.0])
        sample = SimpleNamespace(finish_reason="stop", token_ids=[5, 2], logprobs=logprobs)
        return [SimpleNamespace(outputs=[sample] * sampling.n) for sampling in samplings]


@pytest.fixture
def start(monkeypatch):
    """Starts an engine on a stand-in for vLLM, on a "cuda" or a "cpu"; returns it and the list of calls."""
    for name in ("VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS", "VLLM_CPU_KVCACHE_SPACE", "LD_PRELOAD"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    reloading = logging.getLogger("vllm.model_executor.model_loader.reload.inplace")
    monkeypatch.setattr(reloading, "filters", [])

    def make(device: str, options: dict[str, Any] | None = None) -> tuple[VLLMEngine, list[Any]]:
        calls: list[Any] = []
        vllm, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
        vllm.__spec__ = SimpleNamespace()  # type: ignore[assignment]
        vllm.LLM = lambda **given: StandIn(calls, **given)  # type: ignore[attr-defined]
        vllm.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
        platforms.current_platform = SimpleNamespace(is_cpu=lambda: device == "cpu")  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "vllm", vllm)
        monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
        return VLLMEngine("tiny", "32-true", None, 0.3, options or {}), calls

    return make


def taken(calls: list[Any]) -> list[Any]:
    """The calls since the last time."""
    new = list(calls)
    calls.clear()
    return new


def test_on_a_gpu_sleep_and_sync_come_in_the_order_that_leaves_no_old_weights(start):
    engine, calls = start("cuda")
    model = llama(tie_word_embeddings=True)
    assert engine._llm.options["enable_sleep_mode"] and "enforce_eager" not in engine._llm.options
    engine.sync(model, 1)
    assert taken(calls) == ["reload_weights", "reset_prefix_cache"]
    for version in (2, 3):
        engine.generate(REQUESTS, PARAMS)
        engine.sleep()
        engine.sleep()
        assert taken(calls) == ["generate", ("sleep", 2)]
        with pytest.raises(RuntimeError, match="between sleep and sync"):
            engine.generate(REQUESTS, PARAMS)
        assert taken(calls) == []
        with torch.no_grad():
            model.lm_head.weight.add_(1)
        engine.sync(model, version)
        assert taken(calls) == [
            "empty_cache", ("wake_up", "weights"), "reload_weights", ("wake_up", "kv_cache"), "reset_prefix_cache"
        ]  # fmt: skip
        assert list(engine._llm.weights) == list(model.state_dict())
        assert all(torch.equal(engine._llm.weights[name], tensor) for name, tensor in model.state_dict().items())
        [[first, second]] = engine.generate(REQUESTS, PARAMS)
        assert first.weights_version == version and first.logps == second.logps == [-1.0, -2.0]
        assert taken(calls) == ["generate"]


def test_on_a_cpu_nothing_sleeps(start):
    engine, calls = start("cpu")
    assert engine._llm.options["enforce_eager"] and "enable_sleep_mode" not in engine._llm.options
    engine.sync(llama(), 1)
    engine.sleep()
    engine.generate(REQUESTS, PARAMS)
    engine.sync(llama(), 2)
    assert calls == ["reload_weights", "reset_prefix_cache", "generate", "reload_weights", "reset_prefix_cache"]


def test_a_prefix_cache_that_is_not_given_up_ends_the_run_and_leaves_no_weights_to_sample_from(start):
    engine, _ = start("cuda")
    engine.sync(llama(), 1)
    engine._llm.gives_up = False
    with pytest.raises(RunError, match="did not give up its prefix cache"):
        engine.sync(llama(), 2)
    with pytest.raises(RuntimeError, match="before sync"):
        engine.generate(REQUESTS, PARAMS)


def test_further_arguments_reach_vllm_and_those_the_engine_sets_are_refused_by_name(start):
    composed = compose("train", ["rollout=vllm", "+rollout.engine.options.tensor_parallel_size=1"]).rollout.engine
    assert start("cuda", dict(composed.options))[0]._llm.options["tensor_parallel_size"] == 1
    assert start("cuda", {"enforce_eager": True})[0]._llm.options["enforce_eager"]  # ours on a CPU only
    for device, name in [("cuda", "dtype"), ("cuda", "enable_sleep_mode"), ("cpu", "enforce_eager")]:
        with pytest.raises(UsageError, match=rf"^rollout\.engine\.options\.{name}: .* leave it out"):
            start(device, {"seed": 3, name: True})
    with pytest.raises(UsageError, match=r"could not start .* rollout\.engine\.options=\{'nonsense': 1\}.*unexpected"):
        start("cuda", {"nonsense": 1})


def test_every_group_is_told_of(start):
    engine, _ = start("cpu")
    engine.sync(llama(), 1)
    told = []
    groups = engine.generate(REQUESTS * 2, PARAMS, done=lambda index, group: told.append((index, group)))
    assert told == list(enumerate(groups)) and [len(group) for group in groups] == [2, 2]
