"""How new weights reach a vLLM server: through a folder that both see, or over NCCL between GPUs."""

import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from grpo_lightning.errors import RunError
from grpo_lightning.rollout.server_client import ServerClient
from grpo_lightning.rollout.server_process import free_port
from grpo_lightning.rollout.weights import named_weights

SHARD_BYTES = 1 << 30  # so that a large policy is never whole in memory a second time


class FolderWeights:
    """Weights as safetensors files in a folder, which the server loads.

    Args:
        parent: the folder that trainer and server both see; None makes one in memory (or on disk where there is no
            /dev/shm) for a server on this machine.
    """

    def __init__(self, parent: str | None) -> None:
        self._own = parent is None
        shared_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        self.parent = Path(parent or tempfile.mkdtemp(prefix="grpo_lightning_weights_", dir=shared_memory))
        self.folder: Path | None = None

    def stage(self, policy: nn.Module, version: int) -> None:
        """Write the policy's weights down; the server may still be generating with those before."""
        before, self.folder = self.folder, self.parent / f"{version:08d}"
        try:
            # An interrupted run may have left half a folder of the same name.
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            for number, shard in enumerate(_shards(named_weights(policy))):
                save_file(shard, self.folder / f"model-{number:05d}.safetensors")
        except OSError as error:
            where = "rollout.engine.weights_dir"
            raise RunError(f"the weights could not be written to {self.folder} ({where}): {error}") from error
        if before not in (None, self.folder):
            shutil.rmtree(before, ignore_errors=True)

    def load(self, server: ServerClient, fresh: bool) -> None:
        """Have the server take the staged weights. `fresh`: it has been started since the last call."""
        server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(self.folder)}})

    def close(self) -> None:
        """Remove what was written."""
        for path in (self.parent if self._own else self.folder,):
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)


class NCCLWeights:
    """Weights from the trainer's GPU to those of the server, through vLLM's own weight transfer (vLLM 0.32)."""

    def __init__(self) -> None:
        self._policy: nn.Module | None = None
        self._sender: Any = None

    def stage(self, policy: nn.Module, version: int) -> None:
        """Remember whose weights are to be sent."""
        self._policy = policy

    def load(self, server: ServerClient, fresh: bool) -> None:
        """Send the policy's weights as they are now. `fresh`: the server has been started since the last call."""
        from vllm.distributed.weight_transfer.base import ModuleSource
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        assert self._policy is not None
        if fresh:
            here = _address_towards(str(urlparse(server.url).hostname))  # where the server's workers find the trainer
            world_size = 1 + int(server.get("/get_world_size")["world_size"])
            info = NCCLTrainerInitInfo(rank=0, master_address=here, master_port=free_port(here), world_size=world_size)
            client = HTTPVLLMWeightSyncClient(server.url)
            source = ModuleSource(self._policy)
            self._sender = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
        self._sender.send_weights()

    def close(self) -> None:
        """Take leave of the server."""
        if self._sender is not None:
            self._sender.shutdown()


def _shards(weights: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        # A copy, since safetensors refuses names that share memory, as those of tied embeddings do.
        shard[name] = tensor.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)
        size += tensor.numel() * tensor.element_size()
        if size >= SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def _address_towards(host: str) -> str:
    """The address of this machine on the way to `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])
