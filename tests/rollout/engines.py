"""Engines for tests of whole runs."""

import copy
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from grpo_lightning.rollout.engine import Completion, Request, SamplingParams
from grpo_lightning.rollout.hf import HFEngine


class ThreadedHF:
    """In-process generation with a copy of the weights, on a thread, in order: what a server does. `log` is the order
    of what happened."""

    name = "threaded"
    shared = False
    log: list[str] = []  # noqa: RUF012

    def __init__(self, delay: float = 0.0, **options: Any) -> None:
        self.engine, self.delay = HFEngine(), delay
        self.worker = ThreadPoolExecutor(1)

    def sync(self, policy: nn.Module, version: int) -> None:
        self.worker.submit(self.engine.sync, copy.deepcopy(policy), version).result()
        self.log.append(f"sync {version}")

    def generate(self, requests: list[Request], params: SamplingParams) -> list[list[Completion]]:
        return self.worker.submit(self._generate, requests, params).result()

    def submit(self, requests: list[Request], params: SamplingParams) -> "Future[list[list[Completion]]]":
        self.log.append(f"submit rollout {requests[0].key[2]}")
        return self.worker.submit(self._generate, requests, params)

    @torch.no_grad()
    def _generate(self, requests: list[Request], params: SamplingParams) -> list[list[Completion]]:
        time.sleep(self.delay)
        groups = self.engine.generate(requests, params)
        self.log.append(f"generated with {groups[0][0].weights_version}")
        return groups

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        self.worker.shutdown()


class GroupByGroup(HFEngine):
    """Generates one group after another, and tells of each."""

    def generate(self, requests, params, done=None):
        groups = []
        for index, request in enumerate(requests):
            groups += super().generate([request], params)
            if done is not None:
                done(index, groups[-1])
        return groups
