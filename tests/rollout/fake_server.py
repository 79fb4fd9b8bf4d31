"""A stand-in for a vLLM 0.32 server: the routes that this program uses, without a model. The standard library alone.

`python fake_server.py --host HOST --port PORT ...` is what the fake `vllm` package of test_server_process.py runs.
"""

import contextlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def sample(sampling: dict[str, Any]) -> list[list[int]]:
    """The n completions that the fake answers with: a function of the seed."""
    rows = []
    for index in range(sampling["n"]):
        rng = random.Random(sampling["seed"] + index)
        rows.append([rng.randrange(3, 11) for _ in range(rng.randrange(1, sampling["max_tokens"] + 1))])
    return rows


class FakeServer:
    """Answers at `url` until `stop`. A group goes by the first token of its prompt.

    Attributes:
        faults: {(group, how often it has been asked for, from 1; or None: always): what goes wrong}: "500", "400",
            "cut" (the connection closes in mid-answer), "drop" (before it), "stall", "not json", "old" (weights of an
            earlier version), "mixed" (the version changed on the way), "abort", "few", "other logprobs".
        broken: {path: status codes or answers of its next calls}.
        after: {group: the groups that it waits for until they are answered}. delay: {group: seconds after that}.
        calls: path and body of every call, in order. asked: how often each group was.
    """

    def __init__(self, port: int = 0, host: str = "127.0.0.1") -> None:
        self.faults: dict[tuple[int, int | None], str] = {}
        self.broken: dict[str, list[Any]] = {}
        self.after: dict[int, set[int]] = {}
        self.answered: set[int] = set()
        self.delay: dict[int, float] = {}
        self.calls: list[tuple[str, Any]] = []
        self.asked: Counter[int] = Counter()
        self.busy = self.most_busy = 0
        self.version = "default"
        self.loaded: list[str] | None = None
        self.model_config = {"logprobs_mode": "processed_logprobs", "max_model_len": 64}
        self.release = threading.Event()
        self.lock = threading.Lock()
        self.http = _HTTP((host, port), _handler(self))
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self.release.set()
        self.http.shutdown()
        self.http.server_close()

    def paths(self, without: str = "/health") -> list[str]:
        return [path for path, _ in self.calls if path != without]

    def answer(self, path: str, body: Any) -> Any:
        """The answer as JSON, or (status, message), or the name of a fault of the connection."""
        with self.lock:
            self.calls.append((path, body))
            if self.broken.get(path):
                return self.broken[path].pop(0)
        if path == "/health":
            return None
        if path == "/server_info?config_format=json":
            return {"vllm_config": {"model_config": self.model_config}}
        if path == "/get_world_size":
            return {"world_size": 2}
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            self.loaded = names_in(Path(body["kwargs"]["weights_path"]))
            return {"results": [None]}
        if path == "/reset_prefix_cache":
            return {"success": True}
        if path == "/update_weight_version":
            self.version = body["new_version"]
            return {"success": True, "new_version": self.version}
        if path == "/inference/v1/generate":
            return self.generate(body)
        return 404, "Not Found"

    def generate(self, body: Any) -> Any:
        group, version = body["token_ids"][0], self.version
        with self.lock:
            self.asked[group] += 1
            times = self.asked[group]
            fault = self.faults.get((group, times)) or self.faults.get((group, None))
            self.busy += 1
            self.most_busy = max(self.most_busy, self.busy)
        while not self.after.get(group, set()) <= self.answered and not self.release.wait(0.02):
            pass
        self.release.wait(60 if fault == "stall" else self.delay.get(group, 0))
        with self.lock:
            self.busy -= 1
        if fault in ("500", "400"):
            return int(fault), f"group {group} went wrong"
        spans = {"old": ["default"], "mixed": ["6", version]}.get(fault or "", [version])
        choices = []
        for index, ids in enumerate(sample(body["sampling_params"])):
            entries = [{"token_id": i, "logprob": -i / 8, "rank": 1} for i in ids]
            for entry in entries:
                entry["top_logprobs"] = [dict(entry)]
            if fault == "other logprobs":
                entries[-1]["token_id"] = 0
            length = len(ids) == body["sampling_params"]["max_tokens"]
            choices.append(
                {
                    "index": index,
                    "finish_reason": "abort" if fault == "abort" else "length" if length else "stop",
                    "token_ids": ids,
                    "weight_versions": [
                        {"version": v, "start": at, "end": len(ids) if at == len(spans) - 1 else at + 1}
                        for at, v in enumerate(spans)
                    ],
                    "logprobs": {"content": entries},
                }
            )
        if fault == "few":
            choices.pop()
        if fault is None and times == self.asked[group]:  # else its client has gone and asked again
            self.answered.add(group)
        # vLLM's choices are in order today; nothing says so.
        return fault if fault in ("cut", "drop", "not json") else {"choices": choices[::-1]}


class _HTTP(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no news."""


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply(server.answer(self.path, None))

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            self.reply(server.answer(self.path, json.loads(self.rfile.read(length)) if length else None))

        def reply(self, answer: Any) -> None:
            if answer == "drop":
                self.close_connection = True
                return
            status, content = (200, answer) if not isinstance(answer, tuple) else (answer[0], {"error": {}})
            if isinstance(answer, tuple):
                content["error"]["message"] = answer[1]
            text = b"" if content is None else json.dumps(content).encode()
            if answer == "not json":
                text = b"<html>busy</html>"
            self.send_response(status)
            self.send_header("Content-Length", str(len(text) + (1000 if answer == "cut" else 0)))
            self.end_headers()
            self.wfile.write(text)
            if answer == "cut":
                self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    return Handler


def names_in(folder: Path) -> list[str]:
    """The names of the tensors in a folder of safetensors files."""
    names: list[str] = []
    for file in sorted(folder.glob("*.safetensors")):
        content = file.read_bytes()
        header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
        names += [name for name in header if name != "__metadata__"]
    return names


def main() -> None:
    """A server process. What it does beside answering is in the JSON of FAKE_VLLM:

    "fail": lines to print before it ends with code 1; "child": leave a process behind; "die_at": SIGKILL
    itself when so many groups were answered, if there is no file "died" yet, which it makes; "delay": as of FakeServer,
    until then;
    "hang": never answer, or "hang_after": not once the file "died" is there.
    """
    options = json.loads(os.environ.get("FAKE_VLLM", "{}"))
    if "fail" in options:
        print("\n".join(options["fail"]), file=sys.stderr)
        sys.exit(1)
    child = None
    if "child" in options:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid
    chosen = ("VLLM_SERVER_DEV_MODE", "CUDA_VISIBLE_DEVICES", "VLLM_NO_USAGE_STATS")
    environment = {name: os.environ.get(name) for name in chosen}
    argv = sys.argv[1:]
    print(json.dumps({"pid": os.getpid(), "child": child, "argv": argv, "environment": environment}), flush=True)
    if "hang" in options or ("hang_after" in options and Path(options["died"]).exists()):
        time.sleep(60)
    server = FakeServer(int(argv[argv.index("--port") + 1]), argv[argv.index("--host") + 1])
    if not Path(options.get("died", "")).is_file():
        server.delay = {int(group): seconds for group, seconds in options.get("delay", {}).items()}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    seen = 0
    while True:
        for path, body in server.calls[seen:]:
            seen += 1
            if path != "/health":
                print(json.dumps([path, body]), flush=True)
        if "die_at" in options and len(server.answered) >= options["die_at"]:
            with contextlib.suppress(FileExistsError):
                Path(options["died"]).touch(exist_ok=False)
                time.sleep(0.5)  # the client has them
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
