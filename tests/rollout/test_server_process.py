"""The vLLM server as a process: a fake `vllm` package stands in for the real one."""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_lightning.errors import RunError, UsageError
from grpo_lightning.rollout import server_process
from grpo_lightning.rollout.server_process import ServerProcess, free_port
from grpo_lightning.rollout.vllm_server import VLLMServerEngine
from tests.models import llama
from tests.rollout.fake_server import FakeServer
from tests.rollout.processes import alive, within
from tests.rollout.test_vllm_server import GENERATE, PARAMS, expected, requests

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fake_vllm(tmp_path, monkeypatch):
    """Puts the fake package in the way of the real one; called with what it is to do (see fake_server.main)."""
    package = tmp_path / "packages" / "vllm"
    folder = package / "entrypoints" / "openai"
    folder.mkdir(parents=True)
    for where in (package, folder.parent, folder):
        (where / "__init__.py").touch()
    (folder / "api_server.py").write_text("from tests.rollout.fake_server import main\n\nmain()\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), str(ROOT)]))
    monkeypatch.syspath_prepend(str(package.parent))

    def does(**options: Any) -> None:
        monkeypatch.setenv("FAKE_VLLM", json.dumps(options))

    does()
    return does


@pytest.fixture
def process_of(tmp_path):
    made = []

    def make(**changes: Any) -> ServerProcess:
        options = dict(host="127.0.0.1", port=0, devices=None, log=tmp_path / "logs" / "server.log", start_timeout=30)
        made.append(ServerProcess(["--model", "m"], **(options | changes)))
        return made[-1]

    yield make
    for process in made:
        process.stop()


@pytest.fixture
def engine_of(tmp_path, fake_vllm):
    made = []

    def make(**changes: Any) -> VLLMServerEngine:
        options = dict(
            launch=True, url=None, model="tiny", precision="32-true", max_model_len=None, gpu_memory_utilization=0.4,
            host="127.0.0.1", port=0, devices=None, weights="folder", weights_dir=str(tmp_path / "weights"),
            start_timeout=30, patience=10, retries=1, options={}, log=str(tmp_path / "server.log"),
        )  # fmt: skip
        made.append(VLLMServerEngine(**(options | changes)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def printed(log: Path) -> list[Any]:
    """What the fake servers have printed: a dict for each start, then [path, body] for each call."""
    return [json.loads(line) for line in log.read_text().splitlines() if line[:1] in "{["]


def test_it_starts_with_its_arguments_and_environment_and_stops_with_its_children(fake_vllm, process_of, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    fake_vllm(child=True)
    process = process_of(devices="2,3")
    process.start()
    assert process.answers()
    (start,) = printed(process.log)
    assert start["argv"] == ["--model", "m", "--host", "127.0.0.1", "--port", process.url.rsplit(":", 1)[1]]
    assert start["environment"] == {
        "VLLM_SERVER_DEV_MODE": "1", "CUDA_VISIBLE_DEVICES": "2,3", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    assert alive(start["pid"]) and alive(start["child"])
    process.stop()
    assert not alive(start["pid"]) and not alive(start["child"]) and not process.answers()

    other = process_of()
    other.start()
    assert printed(other.log)[1]["environment"]["CUDA_VISIBLE_DEVICES"] == "7"


def test_stopping_does_not_wait_for_who_still_holds_the_other_end(fake_vllm, process_of, monkeypatch):
    monkeypatch.setattr(server_process, "STOPS_WITHIN", 0.3)
    process = process_of()
    process.start()
    assert process._process is not None and process._process.stdin is not None
    held = os.dup(process._process.stdin.fileno())  # as a process forked from this one does
    (start,) = printed(process.log)
    process.stop()
    os.close(held)
    assert not alive(start["pid"])


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            ["(Worker) ERROR [x.py:1] RuntimeError: no weights in m", "RuntimeError: failed. See root cause above."],
            "RuntimeError: no weights in m",
        ),
        (
            ["pydantic.ValidationError: 1 validation error for ModelConfig", "  Value error, it is too long", "  more"],
            "ValidationError: 1 validation error for ModelConfig Value error, it is too long",
        ),
        (["usage: ...", "api_server.py: error: unrecognized arguments: --x"], "error: unrecognized arguments: --x"),
        (["something", "happened"], "no message"),
    ],
)
def test_a_failed_start_says_why_and_where_to_read_on(fake_vllm, process_of, lines, said):
    fake_vllm(fail=lines)
    process = process_of()
    process.log.parent.mkdir()
    process.log.write_text("ValueError: of an earlier server\n")
    with pytest.raises(RunError) as error:
        process.start()
    assert str(error.value) == f"the vLLM server ended with code 1: {said} (its output: {process.log})"
    assert process.log.read_text() == "\n".join(["ValueError: of an earlier server", *lines, ""])


def test_a_server_that_does_not_answer_in_time_is_stopped(fake_vllm, process_of):
    fake_vllm(hang=True, child=True)
    process = process_of(start_timeout=1.5)
    with pytest.raises(RunError, match=r"no answer .* rollout\.engine\.start_timeout=1\.5 s .*server\.log"):
        process.start()
    (start,) = printed(process.log)
    assert not alive(start["pid"]) and not alive(start["child"])


def test_what_already_answers_at_the_port_is_not_taken_for_the_server(fake_vllm, process_of):
    other = FakeServer()
    process = process_of(port=int(other.url.rsplit(":", 1)[1]))
    with pytest.raises(RunError, match=r"nothing can listen at 127\.0\.0\.1:\d+ \(.*rollout\.engine\.port\)"):
        process.start()
    assert not process.log.exists() and not other.calls
    other.stop()
    process.start()  # a port that has just been closed is free
    assert process.url == other.url
    assert free_port("127.0.0.1") != process.port


def test_options_of_the_engine_become_flags_of_the_server(engine_of, tmp_path):
    options = {"tensor_parallel_size": 2, "enable_lora": True, "log-requests": False, "ranks": [1, 2], "a": {"b": 1}}
    engine_of(precision="bf16-mixed", max_model_len=32, devices=[2, 3], options=options)
    (start, *_) = printed(tmp_path / "server.log")
    line = " ".join(start["argv"])
    for flags in (
        "--tokens-only --logprobs-mode processed_logprobs --dtype bfloat16 --gpu-memory-utilization 0.4",
        "--max-model-len 32",
        '--tensor-parallel-size 2 --enable-lora --no-log-requests --ranks 1 2 --a {"b": 1} --host 127.0.0.1',
    ):
        assert flags in line
    assert start["argv"][0] == "--model" and Path(start["argv"][1]).name == "tiny"
    assert start["environment"]["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_a_killed_server_is_started_again_and_asked_for_what_it_had_not_answered(engine_of, fake_vllm, tmp_path):
    fake_vllm(die_at=3, died=str(tmp_path / "died"), delay={"4": 60, "6": 60})
    engine = engine_of()
    engine.sync(llama(), 7)
    assert engine.generate(requests(5), PARAMS) == expected(requests(5))
    # A server prints what it was asked a little later.
    log = tmp_path / "server.log"
    assert within(5, lambda: sum(isinstance(line, list) and line[0] == GENERATE for line in printed(log)) == 5 + 2)
    lines = printed(log)
    starts = [number for number, line in enumerate(lines) if isinstance(line, dict)]
    assert len(starts) == 2 and not alive(lines[0]["pid"]) and alive(lines[starts[1]]["pid"])
    again = lines[starts[1] + 1 :]
    assert [path for path, _ in again] == [
        "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", GENERATE, GENERATE,
    ]  # fmt: skip
    assert sorted(body["token_ids"][0] for path, body in again if path == GENERATE) == [4, 6]
    engine.close()
    assert not alive(lines[starts[1]]["pid"]) and not list((tmp_path / "weights").iterdir())


def test_closing_while_a_lost_server_starts_again_stops_that_too(engine_of, fake_vllm, tmp_path):
    fake_vllm(die_at=1, died=str(tmp_path / "died"), hang_after=True, delay={"3": 60})
    engine = engine_of(start_timeout=60)
    engine.sync(llama(), 7)
    future = engine.submit(requests(2), PARAMS)

    def starts() -> list[dict]:
        return [line for line in printed(tmp_path / "server.log") if isinstance(line, dict)]

    assert within(20, lambda: len(starts()) == 2)
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 5
    with pytest.raises(RunError, match="stopped before it had answered"):
        future.result(timeout=1)
    assert len(starts()) == 2 and not any(alive(start["pid"]) for start in starts())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("vllm_server")]


def test_a_server_that_does_not_start_is_wrong_usage_and_leaves_nothing(engine_of, fake_vllm, tmp_path):
    fake_vllm(fail=["ValueError: unknown option"])
    with pytest.raises(UsageError, match=r"rollout=vllm_server: .* code 1: ValueError: unknown option \(its output: "):
        engine_of()
    assert not list((tmp_path / "weights").iterdir())


def test_a_run_killed_outright_takes_its_server_along(fake_vllm, tmp_path):
    log = tmp_path / "server.log"
    code = (
        "import os, signal; from pathlib import Path; from grpo_lightning.rollout.server_process import ServerProcess; "
        f"ServerProcess([], host='127.0.0.1', port=0, devices=None, log=Path({str(log)!r}), start_timeout=30).start(); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    fake_vllm(child=True)
    assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", code) == -9
    (start,) = printed(log)
    assert within(5, lambda: not alive(start["pid"]) and not alive(start["child"]))
