"""What a vLLM server (0.32) is asked over HTTP, and what goes wrong on the way."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx

from grpo_lightning.errors import RunError, UsageError

START = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --tokens-only --logprobs-mode processed_logprobs --host 127.0.0.1 "
    "--port 8000"
)


class ServerLost(Exception):
    """The server does not answer, or says that it cannot go on."""


class ServerClient:
    """A client of one server.

    Every method raises ServerLost where asking a server that was restarted may help, and RunError where the server has
    understood and refuses.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._generation: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None

    def healthy(self) -> bool:
        """Whether the server answers that it can generate."""
        try:
            return httpx.get(f"{self.url}/health", timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    def get(self, path: str) -> Any:
        """The JSON answer of GET `path`."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON answer of POST `path`."""
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            # Loading the weights of a large model takes minutes.
            return _answer(httpx.request(method, f"{self.url}{path}", json=body, timeout=1800), path)
        except httpx.TransportError as error:
            raise ServerLost(f"{path}: {type(error).__name__}: {error}") from error

    def room(self) -> int:
        """The most tokens of prompt and completion that the server takes.

        Raises:
            UsageError: it was not started as this program needs it.
        """
        try:
            model = self.get("/server_info?config_format=json")["vllm_config"]["model_config"]
        except (RunError, KeyError, TypeError) as error:
            raise UsageError(f"the vLLM server at {self.url} does not take new weights: start it as {START}") from error
        if model["logprobs_mode"] != "processed_logprobs":
            raise UsageError(
                f"the vLLM server at {self.url} reports {model['logprobs_mode']}, which are not of the distribution "
                f"that it samples from: start it as {START}"
            )
        return int(model["max_model_len"])

    def generate(self, bodies: dict[int, Any], take: Callable[[int, Any], None], patience: float) -> None:
        """Ask for all groups at once and `take` each answer, which is a whole group, as it comes.

        Raises ServerLost when the server is lost or nothing has come for `patience` seconds; what was taken stays so.
        """

        async def run() -> None:
            task = asyncio.ensure_future(self._generate(bodies, take, patience))
            self._generation = asyncio.get_running_loop(), task
            await task

        try:
            asyncio.run(run())
        except asyncio.CancelledError as error:
            raise RunError("generation was given up") from error
        finally:
            self._generation = None

    def give_up(self) -> None:
        """End a `generate` that another thread is in."""
        if self._generation is not None:
            loop, task = self._generation
            loop.call_soon_threadsafe(task.cancel)

    async def _generate(self, bodies: dict[int, Any], take: Callable[[int, Any], None], patience: float) -> None:
        unlimited = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=None, limits=unlimited) as client:
            tasks = {asyncio.create_task(_group(client, body)): index for index, body in bodies.items()}
            waiting = set(tasks)
            try:
                while waiting:
                    done, waiting = await asyncio.wait(
                        waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED
                    )
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


async def _group(client: httpx.AsyncClient, body: Any) -> Any:
    path = "/inference/v1/generate"
    return _answer(await client.post(path, json=body), path)


def _answer(response: httpx.Response, path: str) -> Any:
    if response.status_code >= 500:
        raise ServerLost(f"{path}: {_message(response)}")
    if response.status_code >= 400:
        raise RunError(f"the vLLM server refused {response.url} ({response.status_code}): {_message(response)}")
    return response.json()


def _message(response: httpx.Response) -> str:
    try:
        answer = response.json()
        return str(answer["error"]["message"] if "error" in answer else answer.get("detail", answer))[:400]
    except (ValueError, KeyError, TypeError, AttributeError):
        return " ".join(response.text.split())[:400] or f"status {response.status_code}"
