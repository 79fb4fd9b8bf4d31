"""What a rollout engine is given at a synchronisation: the policy's weights under their checkpoint names."""

from collections.abc import Iterator

from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from grpo_lightning.distributed import whole
from grpo_lightning.lora import ADAPTER, is_adapter_weight, merged


def named_weights(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and whole tensor of every weight, in the order of the state dict, a tied output layer's among them.

    A saved model folder leaves a tied `lm_head.weight` out, but vLLM may hold a packed copy of it, which only that name
    renews. A tensor that is spread over processes is gathered when its turn comes, so that no two are whole at once;
    every process has to go through the whole iterator. Adapters are merged into the weights they belong to, also one at
    a time, and have no names of their own.
    """
    for name, tensor in policy.state_dict().items():
        if is_adapter_weight(name):
            continue
        owner, _, last = name.rpartition(".base_layer.")
        layer = policy.get_submodule(owner) if owner else None
        if not isinstance(layer, LoraLayer):
            yield name, whole(tensor)
        elif last == "weight":
            a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            yield f"{owner}.{last}", merged(layer, whole(tensor), whole(a), whole(b))
        else:
            yield f"{owner}.{last}", whole(tensor)
