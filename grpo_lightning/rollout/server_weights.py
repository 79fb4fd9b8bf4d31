"""How new weights reach a vLLM server: through a folder that both see, or over NCCL between GPUs."""

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from grpo_lightning.errors import RunError, UsageError
from grpo_lightning.rollout.server_client import ServerClient, ServerLost
from grpo_lightning.rollout.server_process import free_port
from grpo_lightning.rollout.weights import named_weights

PREFIX = "grpo_lightning_weights_"
SHARD_BYTES = 1 << 30  # so that a large policy is never whole in memory a second time


class FolderWeights:
    """Weights as safetensors files in a folder, which the server loads.

    Args:
        parent: a folder that trainer and server both see, in which this makes one of its own; None: one in memory (or
            on disk where there is no /dev/shm) for a server on this machine.

    Raises:
        UsageError: `parent` cannot be written to.
    """

    def __init__(self, parent: str | None) -> None:
        if parent is None:
            parent = "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()
            _remove_those_of_killed_runs(Path(parent))
        try:
            above = Path(parent).absolute()  # the server may have been started elsewhere
            above.mkdir(parents=True, exist_ok=True)
            # A folder of this run alone: another with the same parent would have versions of the same names.
            self.parent = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}_", dir=above))
            self.parent.chmod(0o755)  # the server may be another user's
        except OSError as error:
            raise UsageError(f"rollout.engine.weights_dir={parent} cannot be written to: {error}") from error
        self.folder: Path | None = None

    def stage(self, policy: nn.Module, version: int) -> None:
        """Write the policy's weights down. Those before stay until these are whole."""
        folder = self.parent / f"{version:08d}"
        try:
            # A rollout without an optimiser step has the version of the one before.
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for number, shard in enumerate(_shards(named_weights(policy))):
                file = folder / f"model-{number:05d}.safetensors"
                save_file(shard, file)
                file.chmod(0o644)  # safetensors makes its file readable by its owner alone
        except (OSError, SafetensorError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            where = "rollout.engine.weights_dir"
            raise RunError(f"the weights could not be written to {folder} ({where}): {error}") from error
        before, self.folder = self.folder, folder
        if before not in (None, folder):
            shutil.rmtree(before, ignore_errors=True)

    def load(self, server: ServerClient, fresh: bool) -> None:
        """Have the server take the staged weights. `fresh`: it has been started since the last call."""
        try:
            server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(self.folder)}})
        except ServerLost as error:
            where = "rollout.engine.weights_dir, which the server has to see"
            raise ServerLost(f"loading the weights from {self.folder} ({where}): {error}") from error

    def close(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.parent, ignore_errors=True)


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
        import requests  # which vLLM's client uses
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        assert self._policy is not None
        policy = self._policy

        class Source(WeightSource):  # vLLM's own, of a module's parameters, would send adapters beside their base
            def metadata(self) -> list[ParamMeta]:
                return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named_weights(policy)]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                return named_weights(policy)

        if fresh:
            here = _address_towards(str(urlparse(server.url).hostname))  # where the server's workers find the trainer
            world_size = 1 + int(server.get("/get_world_size")["world_size"])
            info = NCCLTrainerInitInfo(rank=0, master_address=here, master_port=free_port(here), world_size=world_size)
            client = HTTPVLLMWeightSyncClient(server.url)
        try:
            if fresh:
                self._sender = WeightTransferTrainerFactory.trainer_init(info, client=client, source=Source())
            self._sender.send_weights()
        except requests.RequestException as error:
            raise ServerLost(f"sending the weights: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Take leave of the server."""
        if self._sender is not None:
            self._sender.shutdown()


def _remove_those_of_killed_runs(parent: Path) -> None:
    """A run that was killed could not give its memory back."""
    for left in parent.glob(f"{PREFIX}*"):
        pid = left.name.removeprefix(PREFIX).partition("_")[0]
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            shutil.rmtree(left, ignore_errors=True)
        except (ValueError, PermissionError):  # not of this program; of another user's run
            continue


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
