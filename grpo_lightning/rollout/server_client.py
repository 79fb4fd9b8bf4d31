"""What a vLLM server (0.32) is asked over HTTP, and what goes wrong on the way."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import httpx

from grpo_lightning.errors import RunError, UsageError

START = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --tokens-only --logprobs-mode processed_logprobs --host 127.0.0.1 "
    "--port 8000"
)


# More at once would only wait inside the server, and a process may have 1024 files open, sockets among them.
AT_ONCE = 256


class ServerLost(Exception):
    """The server does not answer, or says that it cannot go on."""


class ServerClient:
    """A client of one server.

    Every method raises ServerLost where asking a server that was restarted may help, and RunError where the server has
    understood and refuses.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._under_way: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._given_up = False

    def healthy(self) -> bool:
        """Whether the server answers that it can generate."""

        async def ask() -> bool:
            try:
                async with _client(self.url, timeout=10) as client:
                    return (await client.get("/health")).status_code == 200
            except httpx.TransportError:
                return False

        return self._run(ask())

    def get(self, path: str) -> Any:
        """The JSON answer of GET `path`."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON answer of POST `path`."""
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        async def ask() -> Any:
            try:
                async with _client(self.url, timeout=1800) as client:  # the weights of a large model take minutes
                    return _answer(await client.request(method, path, json=body), path)
            except httpx.TransportError as error:
                raise ServerLost(f"{path}: {type(error).__name__}: {error}") from error

        return self._run(ask())

    def room(self) -> int:
        """The most tokens of prompt and completion that the server takes.

        Raises:
            UsageError: it was not started as this program needs it.
        """
        try:
            model = self.get("/server_info?config_format=json")["vllm_config"]["model_config"]
            logprobs_mode, longest = str(model["logprobs_mode"]), int(model["max_model_len"])
        except (RunError, KeyError, TypeError) as error:
            raise UsageError(f"the vLLM server at {self.url} does not take new weights: start it as {START}") from error
        if logprobs_mode != "processed_logprobs":
            raise UsageError(
                f"the vLLM server at {self.url} reports {logprobs_mode}, which are not of the distribution "
                f"that it samples from: start it as {START}"
            )
        return longest

    def generate(self, bodies: dict[int, Any], take: Callable[[int, Any], None], patience: float) -> None:
        """Ask for all groups at once and `take` each answer, which is a whole group, as it comes.

        Raises ServerLost when the server is lost or nothing has come for `patience` seconds; what was taken stays so.
        """

        self._run(self._generate(bodies, take, patience))

    def give_up(self) -> None:
        """End, with a RunError, what another thread is asking, and all that is asked from now on."""
        self._given_up = True
        if (under_way := self._under_way) is not None:
            loop, task = under_way
            with contextlib.suppress(RuntimeError):  # it has just ended, and its loop with it
                loop.call_soon_threadsafe(task.cancel)

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        async def run() -> Any:
            task = asyncio.ensure_future(coroutine)
            self._under_way = asyncio.get_running_loop(), task
            if self._given_up:
                task.cancel()
            return await task

        try:
            return asyncio.run(run())
        except asyncio.CancelledError as error:
            raise RunError("the vLLM server was given up") from error
        finally:
            self._under_way = None

    async def _generate(self, bodies: dict[int, Any], take: Callable[[int, Any], None], patience: float) -> None:
        async with _client(self.url, timeout=None) as client:
            tasks = {asyncio.create_task(_group(client, body)): index for index, body in bodies.items()}
            waiting = set(tasks)
            try:
                while waiting:
                    done, waiting = await asyncio.wait(waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                    if not done:
                        raise ServerLost(f"no completion within {patience:g} s")
                    for task in sorted(done, key=lambda task: task.exception() is not None):
                        take(tasks[task], task.result())
            except httpx.TransportError as error:
                raise ServerLost(f"{type(error).__name__}: {error}") from error
            finally:
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)


def _client(url: str, timeout: float | None) -> httpx.AsyncClient:
    # Not through the environment's HTTP proxy: the server is on this machine or near it.
    limits = httpx.Limits(max_connections=AT_ONCE)
    certificates = url.startswith("https://")  # which take long to read
    return httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits, verify=certificates, trust_env=False)


async def _group(client: httpx.AsyncClient, body: Any) -> Any:
    path = "/inference/v1/generate"
    return _answer(await client.post(path, json=body), path)


def _answer(response: httpx.Response, path: str) -> Any:
    if response.status_code >= 500:
        raise ServerLost(f"{path}: {_message(response)}")
    if response.status_code != 200:
        raise RunError(f"the vLLM server refused {response.url} ({response.status_code}): {_message(response)}")
    try:
        return response.json()
    except ValueError as error:
        raise ServerLost(f"{path}: what it answered is not JSON: {response.text[:100]!r}") from error


def _message(response: httpx.Response) -> str:
    try:
        answer = response.json()
        return str(answer["error"]["message"] if "error" in answer else answer.get("detail", answer))[:400]
    except (ValueError, KeyError, TypeError, AttributeError):
        return " ".join(response.text.split())[:400] or f"status {response.status_code}"
