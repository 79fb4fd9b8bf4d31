"""train.py with the fault that the log-probability gap is there to show: after the first, no synchronisation."""

from torch import nn

from grpo_lightning.rollout.vllm import VLLMEngine
from grpo_lightning.train import main

synchronise = VLLMEngine.sync


def sync(self: VLLMEngine, policy: nn.Module, version: int) -> None:
    if self._version is None:
        synchronise(self, policy, version)
    self._version = version


if __name__ == "__main__":
    VLLMEngine.sync = sync  # type: ignore[method-assign]
    main()
