"""What a rollout engine is given at a synchronisation: the policy's weights under their checkpoint names."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def named_weights(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and whole tensor of every weight, in the order of the state dict, a tied output layer's among them.

    A saved model folder leaves a tied `lm_head.weight` out, but vLLM may hold a packed copy of it, which only that name
    renews. A tensor that is spread over processes is gathered when its turn comes, so that no two are whole at once;
    every process has to go through the whole iterator.
    """
    for name, tensor in policy.state_dict().items():
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
