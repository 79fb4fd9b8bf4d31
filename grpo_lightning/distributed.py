"""The processes of a run, one per device. Where there is one process alone, every function here is the identity."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def _together() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def world_size() -> int:
    """How many processes take part."""
    return dist.get_world_size() if _together() else 1


def rank() -> int:
    """The number of this process, from 0; known before the processes have met, too."""
    return dist.get_rank() if _together() else int(getattr(rank_zero_only, "rank", 0))


def gather(value: Any) -> list[Any]:
    """What every process gives, by rank, on every process. Anything that can be pickled; tensors on the CPU."""
    if not _together():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def share(items: Sequence[Any]) -> list[Any]:
    """This process's part of `items`, which are the same on every process."""
    return list(items[rank() :: world_size()]) if _together() else list(items)


def join(part: list[Any]) -> list[Any]:
    """The inverse of `share`: the parts of all processes, one item each for every item shared, in its order."""
    parts = gather(part)
    joined: list[Any] = [None] * sum(map(len, parts))
    for number, values in enumerate(parts):
        joined[number :: len(parts)] = values
    return joined


def add(values: Tensor, device: torch.device) -> Tensor:
    """The sum over processes of `values`, a float64 vector on the CPU; `device` is where collectives run."""
    return _reduce(values, device, dist.ReduceOp.SUM)


def largest(values: Tensor, device: torch.device) -> Tensor:
    """The largest over processes, entry by entry, of `values`, a float64 vector on the CPU."""
    return _reduce(values, device, dist.ReduceOp.MAX)


def _reduce(values: Tensor, device: torch.device, how: Any) -> Tensor:
    if not _together():
        return values
    there = values.to(device)
    dist.all_reduce(there, op=how)
    return there.cpu()


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds: all of it, unless it is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A tensor with all its parts; a sharded one is gathered, by all processes together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def unshare(model: nn.Module) -> None:
    """Of a sharded model, have the parameters be the shards again: after a forward pass without gradients some of them
    are whole copies, which what is written into does not outlive."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def layers(model: nn.Module) -> list[nn.Module]:
    """The transformer layers, by the name of the class that the model gives as the one not to be split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def shard(model: nn.Module, mesh: DeviceMesh, precision: str) -> None:
    """Shard a transformers model over the processes of `mesh`, each of its layers on its own (FSDP2).

    With bf16-mixed the shards stay in float32, and what is gathered for computing is bfloat16.
    """
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = mixed if precision == "bf16-mixed" else MixedPrecisionPolicy()
    for layer in layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
