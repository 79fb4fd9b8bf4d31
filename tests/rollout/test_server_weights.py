"""How weights reach a server: files in a folder, and vLLM's own transfer between GPUs (with stand-ins for vLLM)."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grpo_lightning.errors import RunError, UsageError
from grpo_lightning.rollout import server_weights
from grpo_lightning.rollout.server_client import ServerClient, ServerLost
from grpo_lightning.rollout.server_weights import FolderWeights, NCCLWeights
from tests.models import llama
from tests.rollout.fake_server import FakeServer


@pytest.fixture
def weights(tmp_path):
    weights = FolderWeights(str(tmp_path / "seen by both"))
    yield weights
    weights.close()


def staged(weights: FolderWeights) -> list[dict[str, torch.Tensor]]:
    assert weights.folder is not None
    return [load_file(file) for file in sorted(weights.folder.iterdir())]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_weight_is_in_bounded_files_the_output_layer_too(weights, monkeypatch, tied):
    policy = llama(tie_word_embeddings=tied)
    sizes = {name: tensor.numel() * 4 for name, tensor in policy.state_dict().items()}
    monkeypatch.setattr(server_weights, "SHARD_BYTES", 10_000)
    weights.stage(policy, 12)
    assert weights.folder.name == "00000012"
    shards = staged(weights)
    assert len(shards) > 2 and "lm_head.weight" in set().union(*shards)
    assert sum(len(shard) for shard in shards) == len(sizes)
    for shard in shards:
        assert sum(sizes[name] for name in shard) < 10_000 + max(sizes.values())
        for name, tensor in shard.items():
            assert torch.equal(tensor, policy.state_dict()[name])


def test_the_folder_before_goes_when_the_new_one_is_whole(weights, monkeypatch):
    weights.stage(llama(), 1)
    before = weights.folder
    seen = []
    save = server_weights.save_file
    with monkeypatch.context() as patch:
        patch.setattr(
            server_weights, "save_file", lambda *given: seen.append(len(list(before.iterdir()))) or save(*given)
        )
        weights.stage(llama(1), 2)
    assert seen == [1] and not before.exists() and [path.name for path in weights.parent.iterdir()] == ["00000002"]
    # A rollout without an optimiser step: the same version again, and nothing left of what was there.
    (weights.folder / "model-00007.safetensors").write_text("half")
    weights.stage(llama(2), 2)
    (shard,) = staged(weights)
    assert torch.equal(shard["lm_head.weight"], llama(2).state_dict()["lm_head.weight"])


def test_a_full_disk_is_one_clear_line_and_what_was_there_stays(weights, monkeypatch):
    weights.stage(llama(), 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(RunError, match=r"could not be written to .*00000002 \(rollout\.engine\.weights_dir\): "):
            weights.stage(llama(), 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def mkdir(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(RunError, match=r"rollout\.engine\.weights_dir\): .*No space left on device"):
        weights.stage(llama(), 2)
    assert weights.folder.name == "00000001" and list(weights.parent.iterdir()) == [weights.folder]


def test_runs_that_share_a_folder_do_not_share_files_and_another_user_can_read_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, other = FolderWeights("shared"), FolderWeights("shared")
    one.stage(llama(), 1)
    other.stage(llama(1), 1)
    assert one.folder != other.folder and one.folder.is_absolute()
    for path in (one.parent, one.folder, *one.folder.iterdir()):
        assert path.stat().st_mode & 0o444 == 0o444
    one.close()
    assert list((tmp_path / "shared").iterdir()) == [other.parent]
    other.close()
    assert not list((tmp_path / "shared").iterdir())


def test_without_a_folder_of_the_user_they_lie_in_memory_until_the_end():
    weights = FolderWeights(None)
    weights.stage(llama(), 1)
    assert weights.parent.parent == Path("/dev/shm") or not Path("/dev/shm").is_dir()
    weights.close()
    assert not weights.parent.exists()
    with pytest.raises(UsageError, match=r"rollout\.engine\.weights_dir=/dev/null cannot be written to"):
        FolderWeights("/dev/null")


@pytest.fixture
def transfer(monkeypatch):
    """Stand-ins for what NCCLWeights takes of vLLM; `events` is what was asked of them, `error` what they raise."""
    seen = SimpleNamespace(events=[], error=None)

    class Sender:
        def send_weights(self) -> None:
            seen.events.append("send")
            if seen.error is not None:
                raise seen.error

        def shutdown(self) -> None:
            seen.events.append("shutdown")

    def trainer_init(info: Any, *, client: Any, source: Any) -> Sender:
        seen.events.append(("init", info, client, source))
        return Sender()

    contents = {
        "base": dict(ParamMeta=lambda name, dtype, shape: (name, dtype, shape), WeightSource=object),
        "clients": dict(HTTPVLLMWeightSyncClient=lambda url: ("client", url)),
        "factory": dict(WeightTransferTrainerFactory=SimpleNamespace(trainer_init=trainer_init)),
        "nccl_engine": dict(NCCLTrainerInitInfo=SimpleNamespace),
    }
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, f"vllm.distributed.weight_transfer.{name}", module)
    requests = ModuleType("requests")
    requests.RequestException = OSError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "requests", requests)
    return seen


def test_what_a_killed_run_left_in_memory_goes_with_the_next_start(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = tmp_path / f"{server_weights.PREFIX}{ended.pid}_x"
    running = tmp_path / f"{server_weights.PREFIX}{os.getpid()}_y"
    other = tmp_path / f"{server_weights.PREFIX}notes"
    for folder in (left, running, other):
        folder.mkdir()
    server_weights._remove_those_of_killed_runs(tmp_path)
    assert not left.exists() and running.exists() and other.exists()


def test_nccl_meets_a_server_once_and_sends_at_every_load(transfer):
    server = FakeServer()
    client, policy, weights = ServerClient(server.url), llama(), NCCLWeights()
    for version, fresh in enumerate([True, False, False, True]):
        weights.stage(policy, version)
        weights.load(client, fresh)
    kinds = [event if isinstance(event, str) else event[0] for event in transfer.events]
    assert kinds == ["init", "send", "send", "send", "init", "send"]
    _, info, to, source = transfer.events[0]
    assert (info.rank, info.world_size, info.master_address) == (0, 1 + 2, "127.0.0.1") and info.master_port > 0
    assert to == ("client", server.url)
    sent = dict(source)
    assert "lm_head.weight" in sent and sent.keys() == policy.state_dict().keys()
    assert source.metadata() == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sent.items()]
    assert server.paths() == ["/get_world_size"] * 2
    weights.close()
    assert transfer.events[-1] == "shutdown"
    server.stop()


def test_a_server_lost_while_weights_are_sent_is_lost_and_may_be_restarted(transfer):
    server = FakeServer()
    weights = NCCLWeights()
    weights.stage(llama(), 1)
    transfer.error = OSError("connection refused")
    with pytest.raises(ServerLost, match="sending the weights: OSError: connection refused"):
        weights.load(ServerClient(server.url), True)
    server.stop()
    NCCLWeights().close()  # one that never sent anything
