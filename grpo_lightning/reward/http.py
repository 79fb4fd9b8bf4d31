"""`reward=http`: a scorer behind an HTTP address."""

import asyncio
import math
import os
from collections.abc import Sequence
from typing import Any

import httpx

from grpo_lightning.errors import RunError, UsageError
from grpo_lightning.reward.score import RewardBatch, Unscored

_TRY_AGAIN = (408, 425, 429)  # and 500 upwards


class Http:
    """POSTs {"prompts", "completions", "answers", "columns"} and takes {"scores": [number or null per completion]}.

    `columns` has a list per column of the data. A request that is not answered so within `timeout` seconds, or with
    the status 408, 425, 429 or 500 upwards, is sent again up to `retries` times, after `backoff` seconds and twice as
    long each further time. Rows still without an answer then have no score. A score that is no finite number is none.

    url: where to. batch_size: completions per request. at_once: requests at the same time.
    columns: the names of the columns to send, null for all.
    token_env: the name of an environment variable with a bearer token.

    Raises UsageError for bad options, RunError if the server refuses (with any other status) before it has ever given
    scores: then the address or the token is wrong. Later refusals only cost their rows.
    """

    by_row = True

    def __init__(
        self,
        url: str | None = None,
        batch_size: int = 64,
        at_once: int = 8,
        timeout: float = 60.0,
        retries: int = 3,
        backoff: float = 1.0,
        columns: Sequence[str] | None = None,
        token_env: str | None = None,
        weight: float = 1.0,
        correctness: bool = False,
    ):
        if url is None or not url.startswith(("http://", "https://")):
            raise UsageError(f"reward.http.url must be an address such as http://127.0.0.1:8000/score, got {url!r}")
        for option, value, least in (("batch_size", batch_size, 1), ("at_once", at_once, 1), ("retries", retries, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"reward.http.{option} must be a whole number from {least}, got {value!r}")
        for option, seconds in (("timeout", timeout), ("backoff", backoff)):
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
                raise UsageError(f"reward.http.{option} must be a number of seconds above 0, got {seconds!r}")
        if columns is not None and (isinstance(columns, str) or not all(isinstance(name, str) for name in columns)):
            raise UsageError(f"reward.http.columns must be a list of names or null, got {columns!r}")
        self._headers = {}
        if token_env is not None:
            if not os.environ.get(token_env):
                raise UsageError(f"reward.http.token_env={token_env}: the environment has no such variable")
            self._headers["Authorization"] = f"Bearer {os.environ[token_env]}"
        self.url, self.batch_size, self.at_once = url, batch_size, at_once
        self.timeout, self.retries, self.backoff, self.columns = timeout, retries, backoff, columns
        self.weight = weight
        self.correctness = correctness
        self._has_answered = False

    def __call__(self, batch: RewardBatch) -> list[Any]:
        columns = batch.columns
        if self.columns is not None:
            missing = [name for name in self.columns if name not in columns]
            if missing:
                there = ", ".join(sorted(columns))
                raise UsageError(f"reward.http.columns: {missing[0]} is no column of the data; there are: {there}")
            columns = {name: columns[name] for name in self.columns}
        spans = [slice(at, at + self.batch_size) for at in range(0, len(batch), self.batch_size)]
        bodies = [
            {
                "prompts": batch.prompts[span],
                "completions": batch.completions[span],
                "answers": batch.answers[span],
                "columns": {name: column[span] for name, column in columns.items()},
            }
            for span in spans
        ]
        return [score for part in asyncio.run(self._score_all(bodies)) for score in part]

    async def _score_all(self, bodies: list[dict[str, Any]]) -> list[list[Any]]:
        free = asyncio.Semaphore(self.at_once)
        certificates = self.url.startswith("https://")  # which take long to read
        # Not through the environment's HTTP proxy: scorers stand near the training.
        async with httpx.AsyncClient(
            headers=self._headers, timeout=None, verify=certificates, trust_env=False
        ) as client:
            return await asyncio.gather(*(self._scores(client, free, body) for body in bodies))

    async def _scores(self, client: httpx.AsyncClient, free: asyncio.Semaphore, body: dict[str, Any]) -> list[Any]:
        count, problem = len(body["completions"]), ""
        for attempt in range(self.retries + 1):
            if attempt:
                await asyncio.sleep(self.backoff * 2 ** (attempt - 1))
            try:
                async with free, asyncio.timeout(self.timeout):  # all of it: a server may also send a byte at a time
                    response = await client.post(self.url, json=body)
                return self._read(response, count)
            except TimeoutError:
                problem = f"no answer within {self.timeout:g} s"
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            except _Failed as failed:
                problem = str(failed)
                if not failed.again:
                    break
            except (TypeError, ValueError) as error:
                raise UsageError(
                    f"reward.http cannot send the data as JSON ({error}): choose reward.http.columns"
                ) from error
        return [Unscored(f"{self.url}: {problem}")] * count

    def _read(self, response: httpx.Response, count: int) -> list[Any]:
        status = response.status_code
        if status != 200:
            said = f"status {status}: {' '.join(response.text.split())[:200]}"
            again = status >= 500 or status in _TRY_AGAIN
            if not again and not self._has_answered:
                raise RunError(f"reward.http: {self.url} refuses: {said}")
            raise _Failed(said, again)
        try:
            scores = response.json()["scores"]
        except (ValueError, KeyError, TypeError):
            raise _Failed(f'the answer is not {{"scores": [...]}} but {response.text[:100]!r}') from None
        if not isinstance(scores, list) or len(scores) != count:
            size = len(scores) if isinstance(scores, list) else "no list of"
            raise _Failed(f"the answer has {size} scores for {count} completions")
        self._has_answered = True
        return [score if _is_score(score) else Unscored(f"{self.url}: the score {score!r:.100}") for score in scores]


class _Failed(Exception):
    """A request gave no scores; `again`: another one may."""

    def __init__(self, message: str, again: bool = True):
        super().__init__(message)
        self.again = again


def _is_score(value: Any) -> bool:
    return value is None or (isinstance(value, bool | int | float) and math.isfinite(value))
