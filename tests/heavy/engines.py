"""An engine for runs of several processes: a thread with a whole copy of the weights, whatever the policy is."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from grpo_lightning.rollout.engine import Completion, Request, SamplingParams
from grpo_lightning.rollout.hf import HFEngine
from grpo_lightning.rollout.weights import named_weights


class ThreadedWhole:
    """Samples in order on a thread, as a server does, each process for its share."""

    name = "threaded"
    shared = False

    def __init__(self, **options: Any) -> None:
        self.engine, self.worker = HFEngine(), ThreadPoolExecutor(1)

    def sync(self, policy: nn.Module, version: int) -> None:
        copy = AutoModelForCausalLM.from_config(policy.config, dtype=torch.float32)
        copy.load_state_dict({name: tensor.clone() for name, tensor in named_weights(policy)})
        self.worker.submit(self.engine.sync, copy, version).result()

    def generate(self, requests: list[Request], params: SamplingParams) -> list[list[Completion]]:
        return self.submit(requests, params).result()

    def submit(self, requests: list[Request], params: SamplingParams) -> "Future[list[list[Completion]]]":
        return self.worker.submit(self.engine.generate, requests, params)

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        self.worker.shutdown()
