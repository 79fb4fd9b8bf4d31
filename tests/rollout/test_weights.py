import weakref

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from grpo_lightning.rollout.weights import named_weights
from tests.models import gpt2, llama


@pytest.mark.parametrize("model", [llama(), llama(tie_word_embeddings=True), gpt2()], ids=["untied", "tied", "gpt2"])
def test_every_weight_comes_once_under_its_checkpoint_name_the_tied_head_too(model):
    weights = list(named_weights(model))
    assert [name for name, _ in weights] == list(model.state_dict())
    names = dict(weights)
    assert "lm_head.weight" in names and not any(tensor.requires_grad for tensor in names.values())
    torch.testing.assert_close(names["lm_head.weight"], model.get_output_embeddings().weight, rtol=0, atol=0)
    with torch.no_grad():
        model.lm_head.weight.add_(1)  # no copies: the weights are those of the policy as it is
    torch.testing.assert_close(names["lm_head.weight"], model.lm_head.weight.detach(), rtol=0, atol=0)


@pytest.fixture
def mesh(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_a_spread_tensor_is_gathered_when_its_turn_comes_and_let_go_before_the_next(mesh, monkeypatch):
    policy = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    expected = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    for module in policy:
        for name, parameter in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    gathered: list[weakref.ref] = []

    def full_tensor(self, gather=DTensor.full_tensor):
        assert not any(earlier() is not None for earlier in gathered), "two whole tensors at once"
        whole = gather(self).clone()
        gathered.append(weakref.ref(whole))
        return whole

    monkeypatch.setattr(DTensor, "full_tensor", full_tensor)
    weights = named_weights(policy)
    assert not gathered
    seen = []
    for number in range(len(expected)):
        name, whole = next(weights)
        assert len(gathered) == number + 1 and not isinstance(whole, DTensor)
        torch.testing.assert_close(whole, expected[name], rtol=0, atol=0)
        seen.append(name)
        del whole
    assert seen == list(expected) and next(weights, None) is None
