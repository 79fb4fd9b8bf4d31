"""The engine of rollout=vllm_server, against a server that answers as vLLM does and can misbehave."""

import importlib.util
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grpo_lightning.errors import RunError, UsageError
from grpo_lightning.objective.load import compose
from grpo_lightning.rollout import server_client, vllm_server
from grpo_lightning.rollout.engine import Completion, Request, SamplingParams
from grpo_lightning.rollout.server_process import free_port
from grpo_lightning.rollout.vllm_requests import sampling_options
from grpo_lightning.rollout.vllm_server import VLLMServerEngine
from tests.models import llama
from tests.rollout.fake_server import FakeServer, sample

PARAMS = SamplingParams(6, 1.0, (2,))
GENERATE = "/inference/v1/generate"
LOAD = ["/collective_rpc", "/reset_prefix_cache", "/update_weight_version"]


@pytest.fixture
def server():
    server = FakeServer()
    yield server
    server.stop()


@pytest.fixture
def engine_of(tmp_path):
    """Makes engines, and closes them."""
    made = []

    def make(url: str | None, **changes: Any) -> VLLMServerEngine:
        options = dict(
            launch=False, url=url, model="tiny", precision="32-true", max_model_len=None, gpu_memory_utilization=0.4,
            host="127.0.0.1", port=0, devices=None, weights="folder", weights_dir=str(tmp_path / "weights"),
            start_timeout=5, patience=10, retries=3, options={}, log=str(tmp_path / "server.log"),
        )  # fmt: skip
        made.append(VLLMServerEngine(**(options | changes)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def policy() -> torch.nn.Module:
    return llama(tie_word_embeddings=True)


def requests(count: int, n: int = 3) -> list[Request]:
    """Their groups go by the numbers 3, 4, ... in the fake server."""
    return [Request((3 + number, 4, 5), (0, 0, 1, number), n) for number in range(count)]


def expected(asked: list[Request], version: int = 7, params: SamplingParams = PARAMS) -> list[list[Completion]]:
    groups = []
    for request in asked:
        group = []
        for ids in sample(sampling_options(request, params)):
            reason = "length" if len(ids) == params.max_new_tokens else "stop"
            group.append(Completion(ids, [-i / 8 for i in ids], reason, version))
        groups.append(group)
    return groups


def loaded_folders(server: FakeServer) -> list[str]:
    return [body["kwargs"]["weights_path"] for path, body in server.calls if path == "/collective_rpc"]


def test_a_sync_loads_the_weights_then_empties_the_cache_then_names_them(server, engine_of, policy):
    engine = engine_of(server.url)
    with pytest.raises(RuntimeError, match="before sync"):
        engine.generate(requests(1), PARAMS)
    assert server.paths() == ["/server_info?config_format=json"]
    engine.sync(policy, 7)
    assert server.paths()[1:] == LOAD and server.version == "7"
    # Also the tied output layer: vLLM may hold a copy of it that only this name renews.
    assert sorted(server.loaded) == sorted(policy.state_dict()) and "lm_head.weight" in server.loaded
    weights = load_file(Path(loaded_folders(server)[0]) / "model-00000.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in policy.state_dict().items())


def test_groups_come_back_in_the_order_of_the_requests_and_completions_in_that_of_their_samples(
    server, engine_of, policy
):
    engine = engine_of(server.url)
    engine.sync(policy, 7)
    server.delay = {3: 0.4, 4: 0.2, 5: 0.3}
    assert engine.generate(requests(6), PARAMS) == expected(requests(6))
    assert engine.generate([], PARAMS) == []
    body = next(body for path, body in server.calls if path == GENERATE and body["token_ids"][0] == 4)
    assert body == {"token_ids": [4, 4, 5], "sampling_params": sampling_options(requests(6)[1], PARAMS)}


def test_each_group_is_told_of_as_it_comes_and_once_also_after_a_loss(server, engine_of, policy):
    engine = engine_of(server.url)
    engine.sync(policy, 7)
    server.after, server.delay = {3: {4, 5}}, {3: 0.2}
    server.faults = {(3, 1): "500"}
    told = []
    groups = engine.generate(requests(3), PARAMS, done=lambda index, group: told.append((index, group)))
    assert groups == expected(requests(3)) and sorted(told, key=lambda t: t[0]) == list(enumerate(groups))
    assert told[-1][0] == 0  # the other two did not wait for it
    greedy = SamplingParams(6, 0.0, (2,))
    engine.generate(requests(1), greedy, done=lambda index, group: told.append((index, group)))
    assert len(told) == 4 and len(told[-1][1]) == 3

    def stop(index, group):
        raise RunError("enough")

    with pytest.raises(RunError, match="enough"):
        engine.generate(requests(3), PARAMS, done=stop)
    server.after, server.delay = {}, {}
    assert engine.generate(requests(2), PARAMS) == expected(requests(2))  # and it goes on


@pytest.mark.parametrize("fault", ["500", "cut", "drop", "not json", "old", "mixed", "stall"])
def test_after_a_loss_only_what_was_not_answered_is_asked_again_with_the_weights_loaded_again(
    server, engine_of, policy, fault
):
    engine = engine_of(server.url, patience=2 if fault == "stall" else 60)
    engine.sync(policy, 7)
    # Group 5 goes wrong when 3, 4, 6 and 8 have been answered, and 7 has not.
    server.faults, server.after, server.delay = {(5, 1): fault, (7, 1): "stall"}, {5: {3, 4, 6, 8}}, {5: 0.5}
    start = len(server.calls)
    assert engine.generate(requests(6), PARAMS) == expected(requests(6))
    assert dict(server.asked) == {3: 1, 4: 1, 5: 2, 6: 1, 7: 2, 8: 1}
    after = [path for path, _ in server.calls[start:] if path != "/health"]
    assert after == [GENERATE] * 6 + LOAD + [GENERATE] * 2


def test_a_server_that_was_restarted_behind_our_back_gets_the_weights_again(server, engine_of, policy):
    engine = engine_of(server.url)
    engine.sync(policy, 7)
    server.version = "default"
    assert engine.generate(requests(4), PARAMS) == expected(requests(4))
    assert len(set(loaded_folders(server))) == 1 and len(loaded_folders(server)) == 2


@pytest.mark.parametrize("fault", ["old", "500"])
def test_losses_in_a_row_end_the_run_and_say_where_and_how_to_go_on(server, engine_of, policy, fault):
    engine = engine_of(server.url, retries=2)
    engine.sync(policy, 7)
    server.faults, server.after, server.delay = {(4, None): fault}, {4: {3, 5}}, {4: 0.3}
    with pytest.raises(RunError) as error:
        engine.generate(requests(3), PARAMS)
    why = "weights ['default'] instead of 7" if fault == "old" else "group 4 went wrong"
    # The first loss came after two groups; then there were two without any.
    assert "lost 3 times in a row" in str(error.value) and why in str(error.value)
    for part in ("rollout.engine.retries=2", server.url, "resume=FOLDER"):
        assert part in str(error.value)
    assert server.asked[4] == 3 and server.asked[3] == 1


def test_losses_with_completions_between_do_not_add_up(server, engine_of, policy):
    engine = engine_of(server.url, retries=1)
    engine.sync(policy, 7)
    # Group 3 is answered and 4 lost, then 4 is answered and 5 lost, ...
    server.after, server.delay = {3 + k: {2 + k} for k in range(1, 5)}, {3 + k: 0.3 for k in range(1, 5)}
    server.faults = {(3 + k, k): "500" for k in range(1, 5)}
    assert engine.generate(requests(5), PARAMS) == expected(requests(5))
    assert server.asked[7] == 5


def test_a_refusal_ends_the_run_at_once(server, engine_of, policy):
    engine = engine_of(server.url)
    engine.sync(policy, 7)
    server.faults = {(4, None): "400"}
    with pytest.raises(RunError, match=r"refused http.*/inference/v1/generate \(400\): group 4 went wrong"):
        engine.generate(requests(3), PARAMS)
    assert server.asked[4] == 1 and len(loaded_folders(server)) == 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("abort", "'abort' instead of stop or length"),
        ("few", "2 completions of a prompt instead of 3"),
        ("other logprobs", "not those of the tokens it sampled"),
    ],
)
def test_an_answer_that_cannot_be_used_ends_the_run(server, engine_of, policy, fault, message):
    engine = engine_of(server.url)
    engine.sync(policy, 7)
    server.faults = {(4, None): fault}
    with pytest.raises(RunError, match=message):
        engine.generate(requests(2), PARAMS)


def test_a_sync_that_is_lost_begins_again(server, engine_of, policy):
    engine = engine_of(server.url, retries=1)
    server.broken = {"/collective_rpc": [(500, "worker died")], "/update_weight_version": ["drop"]}
    with pytest.raises(RunError, match=r"lost 2 times in a row .*retries=1"):
        engine.sync(policy, 7)
    server.broken = {"/collective_rpc": [(500, "no such folder")] * 2}
    with pytest.raises(RunError, match=r"engine\.weights_dir, which the server has to see\): .*no such folder"):
        engine.sync(policy, 7)
    server.broken = {"/collective_rpc": [(500, "worker died")]}
    start = len(server.calls)
    engine.sync(policy, 8)
    after = [path for path, _ in server.calls[start:] if path != "/health"]
    assert after == ["/collective_rpc", *LOAD] and server.version == "8"
    assert engine.generate(requests(1), PARAMS) == expected(requests(1), 8)


def test_a_cache_in_use_is_asked_for_again_and_a_kept_one_is_a_loss(server, engine_of, policy, monkeypatch):
    engine = engine_of(server.url, retries=0)
    server.broken = {"/reset_prefix_cache": [{"success": False}] * 2}
    engine.sync(policy, 7)
    assert server.paths()[1:] == ["/collective_rpc", *["/reset_prefix_cache"] * 3, "/update_weight_version"]
    monkeypatch.setattr(vllm_server, "RESET_WITHIN", 0.2)
    server.broken = {"/reset_prefix_cache": [{"success": False}] * 99}
    with pytest.raises(RunError, match="it did not give up its prefix cache"):
        engine.sync(policy, 8)
    assert server.version == "7"


def test_submit_returns_at_once_and_a_sync_waits_for_it(server, engine_of, policy):
    engine = engine_of(server.url)
    engine.sync(policy, 7)
    server.delay = {4: 1.5}
    started = time.monotonic()
    future = engine.submit(requests(2), PARAMS)
    assert time.monotonic() - started < 1 and not future.done()
    engine.sync(policy, 8)
    assert future.done() and future.result() == expected(requests(2), 7)
    assert server.paths()[1:] == [*LOAD, GENERATE, GENERATE, *LOAD]


def test_what_is_lost_while_a_sync_waits_is_sampled_with_the_weights_from_before(server, engine_of, policy):
    engine = engine_of(server.url)
    engine.sync(policy, 7)
    server.faults, server.delay = {(4, 1): "500"}, {4: 0.3}
    future = engine.submit(requests(2), PARAMS)
    engine.sync(llama(1, tie_word_embeddings=True), 8)
    assert future.result() == expected(requests(2), 7)
    assert [Path(folder).name for folder in loaded_folders(server)] == ["00000007", "00000007", "00000008"]


def test_greedy_completions_are_sampled_once_and_repeated_for_each_request(server, engine_of, policy):
    engine = engine_of(server.url)
    engine.sync(policy, 7)
    greedy = SamplingParams(6, 0.0, (2,))
    asked = [*requests(2, n=4), Request((9, 4), (0, 0, 1, 9), 2)]
    groups = engine.generate(asked, greedy)
    assert [len(group) for group in groups] == [4, 4, 2]
    alone = expected(asked, params=greedy)
    assert groups == [group * request.n for group, request in zip(alone, asked, strict=True)]
    assert {body["sampling_params"]["n"] for path, body in server.calls if path == GENERATE} == {1}


def test_no_more_is_asked_at_once_than_there_are_connections_for(server, engine_of, policy, monkeypatch):
    monkeypatch.setattr(server_client, "AT_ONCE", 3)
    engine = engine_of(server.url)
    engine.sync(policy, 7)
    server.delay = dict.fromkeys(range(3, 15), 0.05)
    assert engine.generate(requests(12), PARAMS) == expected(requests(12))
    assert server.most_busy == 3


def test_a_proxy_of_the_environment_is_not_asked(server, engine_of, policy, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    engine = engine_of(server.url)
    engine.sync(policy, 7)
    assert engine.generate(requests(2), PARAMS) == expected(requests(2))


@pytest.mark.parametrize("when", ["generating", "waiting for a server", "loading weights"])
def test_closing_ends_what_is_under_way_at_once_and_leaves_nothing(server, engine_of, policy, tmp_path, when):
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "notes.txt").write_text("of the user")
    engine = engine_of(server.url, start_timeout=600, patience=600)
    engine.sync(policy, 7)
    assert len(list(folder.iterdir())) == 2
    server.faults = {(3, None): "stall"}
    if when == "waiting for a server":
        server.faults, server.broken = {(3, None): "500"}, {"/health": [(503, "gone")] * 999}
    if when == "loading weights":
        release = threading.Event()
        server.answer, answer = lambda path, body: release.wait(30) or answer(path, body), server.answer  # type: ignore
        raised: list[Exception] = []

        def sync() -> None:
            try:
                engine.sync(policy, 8)
            except RunError as error:
                raised.append(error)

        thread = threading.Thread(target=sync)
        thread.start()
        time.sleep(0.3)
    else:
        future = engine.submit(requests(2), PARAMS)
        time.sleep(0.3)
    started, calls = time.monotonic(), server.paths()
    engine.close()
    assert time.monotonic() - started < 2
    if when == "loading weights":
        thread.join(2)
        assert not thread.is_alive() and "given up" in str(raised[0])
        release.set()
    else:
        with pytest.raises(RunError, match=r"given up|stopped"):
            future.result(timeout=1)
    assert server.paths() == calls
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("vllm_server")]
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(launch=True), r"rollout\.url=http.* is a server that you started: add rollout\.launch=false"),
        (dict(url=None), r"rollout\.launch=false needs rollout\.url=http://HOST:PORT, .*VLLM_SERVER_DEV_MODE=1 vllm"),
        (dict(url="localhost:8000"), r"rollout\.url=localhost:8000 must begin with http:// or https://"),
        (dict(weights="smoke"), r"rollout\.engine\.weights must be folder or nccl, got smoke"),
        (dict(weights="nccl"), r"rollout\.engine\.weights=nccl needs a CUDA GPU here and another in the server"),
        (dict(gpu_memory_utilization=1.5), r"rollout\.engine\.gpu_memory_utilization must be in \(0, 1\], got 1\.5"),
        (dict(start_timeout=0), r"rollout\.engine\.start_timeout must be at least 1, got 0"),
        (dict(patience=0.5), r"rollout\.engine\.patience must be at least 1, got 0\.5"),
        (dict(retries=-1), r"rollout\.engine\.retries must be at least 0, got -1"),
        (dict(options={"logprobs-mode": "raw_logprobs"}), r"rollout\.engine\.options\.logprobs-mode is set by this"),
        (dict(weights_dir="/dev/null/x"), r"rollout\.engine\.weights_dir=/dev/null/x cannot be written to"),
    ],
)
def test_options_that_cannot_work_are_refused(server, engine_of, monkeypatch, changes, message):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=message):
        engine_of(**({"url": server.url} | changes))


@pytest.mark.parametrize("changes", [dict(launch=True, url=None), dict(weights="nccl", url="http://127.0.0.1:9")])
def test_without_vllm_the_message_says_what_would_do(engine_of, monkeypatch, changes):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install vllm==0\.32\.0 .*make setup-vllm-cpu.*rollout\.launch=false"):
        engine_of(**changes)


@pytest.mark.parametrize("broken", ["no routes", "other config", "raw"])
def test_a_server_that_was_started_otherwise_is_refused_with_the_right_command(server, engine_of, tmp_path, broken):
    if broken == "no routes":
        server.broken = {"/server_info?config_format=json": [(404, "Not Found")]}
        message = "does not take new weights: start it as VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --tokens-only"
    elif broken == "other config":
        server.model_config = {}
        message = "does not take new weights: start it as"
    else:
        server.model_config["logprobs_mode"] = "raw_logprobs"
        message = "reports raw_logprobs, which are not of the distribution .* --logprobs-mode processed_logprobs"
    with pytest.raises(UsageError, match=message):
        engine_of(server.url)
    assert not list((tmp_path / "weights").iterdir())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("vllm_server")]


@pytest.mark.parametrize("there", [False, True], ids=["nothing listens", "it is not ready"])
def test_a_server_that_never_answers_is_wrong_usage_within_the_time(server, engine_of, there):
    server.broken = {"/health": [(503, "starting")] * 99}
    url = server.url if there else f"http://127.0.0.1:{free_port('127.0.0.1')}"
    started = time.monotonic()
    with pytest.raises(UsageError, match=rf"at rollout\.url={url} within rollout\.engine\.start_timeout=1 s; start it"):
        engine_of(url, start_timeout=1)
    assert time.monotonic() - started < 3


def test_prompts_that_do_not_fit_in_the_servers_room_are_refused_before_they_are_sent(server, engine_of, policy):
    engine = engine_of(server.url)
    engine.sync(policy, 7)
    with pytest.raises(UsageError, match=r"a prompt of 60 tokens .*max_new_tokens=6 do not fit in the 64 tokens"):
        engine.generate([Request((3,) * 60, (0,), 2)], PARAMS)
    with pytest.raises(UsageError, match=r"temperature must be in \[0\.01, 2\]"):
        engine.submit(requests(1), SamplingParams(6, 3.0, (2,)))
    assert GENERATE not in server.paths()


def test_the_options_of_the_configuration_are_those_of_the_engine(server, tmp_path):
    options = dict(compose("train", ["rollout=vllm_server"]).rollout.engine)
    assert options.pop("_target_").endswith(".VLLMServerEngine") and options["launch"] is True
    engine = VLLMServerEngine(**(options | dict(launch=False, url=server.url, log=str(tmp_path / "log"))))
    engine.close()
