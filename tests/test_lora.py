"""LoRA: what is trained, what the reference policy is, what engines and exports get, and what a checkpoint holds."""

import csv
import json
from pathlib import Path

import peft
import pytest
import torch
from torch import nn

from grpo_lightning.errors import RunError, UsageError
from grpo_lightning.lora import add_adapters, check_lora, has_adapters, is_adapter_weight, without_adapters
from grpo_lightning.model import load_policy, load_tokenizer, resolve_path
from grpo_lightning.module import GRPOModule
from grpo_lightning.rollout.buffer import Row
from grpo_lightning.rollout.weights import named_weights
from tests.conftest import character_tokenizer
from tests.models import gpt2, llama
from tests.test_module import Fill, fit, make_rows

LORA = {"r": 4, "alpha": None, "target_modules": None}
IDS = torch.arange(3, 11)[None]
MODELS = {"untied": llama, "tied": lambda: llama(tie_word_embeddings=True), "gpt2": gpt2}


def adapted(model: nn.Module, seed: int = 1, **options) -> nn.Module:
    """The model with adapters that do something."""
    add_adapters(model, **({"r": 4} | options))
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if is_adapter_weight(name):
            nn.init.normal_(parameter, std=0.05)
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def policy_folder(folder: Path, model: nn.Module | None = None) -> Path:
    (model or llama(0)).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def adapter_folder(folder: Path, base: Path) -> Path:
    """What supervised fine-tuning with peft leaves behind: an adapter whose B is not zero."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.1, init_lora_weights=False)
    torch.manual_seed(5)
    peft.get_peft_model(load_policy(str(base)), config).save_pretrained(folder)
    return folder


def test_only_the_adapters_are_trained_in_float32_and_they_change_nothing_at_first(tmp_path):
    base = policy_folder(tmp_path / "base", llama(0).bfloat16())
    policy = load_policy(str(base), lora=LORA)
    trained = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 2 * 7 and all(map(is_adapter_weight, trained))  # A and B, 2 layers, 7 linear modules
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    assert not any("lm_head" in name for name in trained)
    assert torch.equal(logits(policy), logits(load_policy(str(base))))
    assert {p.shape[0] for name, p in trained.items() if ".lora_A." in name} == {4}


@pytest.mark.parametrize("alpha,scale", [(None, 2.0), (12, 3.0), (1.0, 0.25)])
def test_what_the_adapters_add_is_scaled_by_alpha_over_r(alpha, scale):
    policy = adapted(llama(), alpha=alpha, target_modules=["q_proj"])
    weights, layer = dict(named_weights(policy)), policy.model.layers[0].self_attn.q_proj
    added = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    got = weights["model.layers.0.self_attn.q_proj.weight"] - llama().model.layers[0].self_attn.q_proj.weight
    torch.testing.assert_close(got, scale * added, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_merged_weights_make_an_ordinary_model_that_computes_the_same(name):
    policy, plain = adapted(MODELS[name]()), MODELS[name]()
    before = logits(plain)
    weights = dict(named_weights(policy))
    assert list(weights) == list(plain.state_dict()) and not any(tensor.requires_grad for tensor in weights.values())
    plain.load_state_dict(weights)
    torch.testing.assert_close(logits(plain), logits(policy), atol=1e-5, rtol=1e-5)
    assert (logits(plain) - before).abs().max() > 0.01
    torch.testing.assert_close(dict(named_weights(policy)), weights, atol=0, rtol=0)  # asking changes nothing


@pytest.mark.parametrize("name", MODELS)
def test_without_adapters_the_policy_is_the_model_they_were_put_into(name):
    policy = adapted(MODELS[name]())
    with without_adapters(policy):
        assert torch.equal(logits(policy), logits(MODELS[name]()))
        assert all(parameter.requires_grad for name, parameter in policy.named_parameters() if is_adapter_weight(name))
    with pytest.raises(KeyError), without_adapters(policy):
        raise KeyError
    assert not torch.equal(logits(policy), logits(MODELS[name]()))  # on again, after an error too


def test_options_that_mean_nothing_are_refused():
    for options, match in (
        ((None, 8, None), "model.lora.alpha does nothing without model.lora.r"),
        ((None, None, ["q_proj"]), "model.lora.target_modules does nothing without"),
        ((0, None, None), "model.lora.r must be at least 1"),
        ((4, -1, None), "model.lora.alpha must be above 0"),
        ((4, None, 3), "model.lora.target_modules must be a list"),
        ((4, None, [3]), "model.lora.target_modules must be a list"),
    ):
        with pytest.raises(UsageError, match=match):
            check_lora(*options)
    for names in (["qproj"], "qproj", ["q_proj", "qproj"], ["embed_tokens", "qproj"]):
        with pytest.raises(UsageError, match=r"model.lora.target_modules=.*qproj; it has down_proj, .*q_proj"):
            add_adapters(llama(), r=4, target_modules=names)
    with pytest.raises(UsageError, match=r"model\.lora\.target_modules="):
        add_adapters(llama(), r=4, target_modules=[])
    with pytest.raises(UsageError, match="output layer"):
        add_adapters(llama(tie_word_embeddings=True), r=4, target_modules=["q_proj", "lm_head"])
    names = [n for n, _ in named_weights(adapted(llama(), target_modules=["lm_head"]))]
    assert names == list(llama().state_dict())


def test_a_name_chooses_the_layers_that_end_in_it():
    for names, count in ((["q_proj"], 2), ("q_proj", 2), (["q_proj", "layers.1.mlp.up_proj"], 3), (["proj"], 0)):
        model = llama()
        if count:
            add_adapters(model, r=1, target_modules=names)
            assert sum(name.endswith("lora_A.default.weight") for name in model.state_dict()) == count
        else:
            with pytest.raises(UsageError):
                add_adapters(model, r=1, target_modules=names)


def test_an_adapter_of_fine_tuning_is_part_of_the_policy_that_training_starts_from(tmp_path):
    # P47: the reference is the fine-tuned model, not the bare base model.
    base = policy_folder(tmp_path / "base")
    sft = adapter_folder(tmp_path / "sft", base)
    tuned = peft.PeftModel.from_pretrained(load_policy(str(base)), str(sft)).eval()
    policy = load_policy(str(sft))
    assert not has_adapters(policy) and all(parameter.requires_grad for parameter in policy.parameters())
    assert list(policy.state_dict()) == list(load_policy(str(base)).state_dict())
    torch.testing.assert_close(logits(policy), logits(tuned), atol=1e-5, rtol=1e-5)
    assert (logits(policy) - logits(load_policy(str(base)))).abs().max() > 1e-2
    with_lora = load_policy(str(sft), lora=LORA)
    assert torch.equal(logits(with_lora), logits(policy))
    with without_adapters(with_lora):
        assert torch.equal(logits(with_lora), logits(policy))
    # Engines start from the base model, and then get the merged weights. The tokenizer is the adapter's, if it has one.
    assert resolve_path(str(sft)) == str(base)
    assert load_tokenizer(str(sft)).eos_token == "<eos>"
    tokenizer = character_tokenizer()
    tokenizer.eos_token = "+"
    tokenizer.save_pretrained(sft)
    assert load_tokenizer(str(sft)).eos_token == "+"


def test_an_adapter_folder_that_cannot_be_used_is_one_line(tmp_path):
    sft = adapter_folder(tmp_path / "sft", policy_folder(tmp_path / "base"))
    config = json.loads((sft / "adapter_config.json").read_text())
    for base, match in (
        (str(tmp_path / "gone"), "base model is not there.*gone"),
        (None, "names no base_model_name_or_path"),
        (str(sft), "names the adapter itself"),
        (str(policy_folder(tmp_path / "other", llama(hidden_size=16))), "could not be loaded"),
    ):
        (sft / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
        with pytest.raises(UsageError, match=match) as caught:
            load_policy(str(sft))
        assert str(sft) in str(caught.value) and "\n" not in str(caught.value)


class ScoringFill(Fill):
    """Fills the buffer with fixed rows scored by the reference, and remembers what reference and policy said."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__(rows)
        self.reference: list[list[torch.Tensor]] = []
        self.policy: list[list[torch.Tensor]] = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.reference.append([s.logp for s in pl_module.score(self.rows, True)])
        self.policy.append([s.logp for s in pl_module.score(self.rows, False)])
        for row, logp in zip(self.rows, self.reference[-1], strict=True):
            row.ref_logp = logp
        super().on_train_epoch_start(trainer, pl_module)


def test_the_reference_is_the_policy_with_its_adapters_off_from_the_first_step_to_the_last(tmp_path):
    policy = llama(0)
    add_adapters(policy, r=4)
    rows = make_rows()
    module, fill = fit(rows, ["kl=k3"], tmp_path, policy=policy, rollouts=3, lr=0.5, fill=ScoringFill)
    kl = [metrics["policy/kl"] for metrics in fill.metrics]
    assert abs(kl[0]) < 1e-6 and min(kl[1:]) > 1e-4
    for number, scored in enumerate(fill.reference):
        torch.testing.assert_close(scored, fill.reference[0], atol=0, rtol=0)
        assert number == 0 or not torch.equal(fill.policy[number][0], fill.policy[0][0])
    plain = GRPOModule(llama(0), module.objective, module.buffer, torch.optim.SGD)
    plain.trainer = module.trainer
    torch.testing.assert_close([s.logp for s in plain.score(rows, False)], fill.reference[0], atol=0, rtol=0)
    with pytest.raises(RuntimeError, match="kl=none"):
        [s.logp for s in plain.score(rows, True)]
    for name, value in llama(0).state_dict().items():
        now = module.policy.state_dict()
        assert torch.equal(now[name if name in now else name.replace("proj.", "proj.base_layer.")], value), name


def test_checkpoints_hold_the_adapters_alone_and_refuse_other_ones(tmp_path):
    module, _ = fit(make_rows(), ["kl=none"], tmp_path, policy=adapted(llama(0)))
    names = {name for name in module.state_dict() if is_adapter_weight(name)}
    module.trainer.save_checkpoint(tmp_path / "lora.ckpt")
    saved = torch.load(tmp_path / "lora.ckpt", weights_only=False)
    assert saved["state_dict"].keys() == names and len(names) == 28
    plain, _ = fit(make_rows(), ["kl=none"], tmp_path, policy=llama(0))
    plain.trainer.save_checkpoint(tmp_path / "full.ckpt")
    full = torch.load(tmp_path / "full.ckpt", weights_only=False)
    assert full["state_dict"].keys() == plain.state_dict().keys() and plain.strict_loading
    for other in (full, {**saved, "state_dict": dict(list(saved["state_dict"].items())[1:])}):
        with pytest.raises(RunError, match=r"model\.lora"):
            module.on_load_checkpoint(other)
    module.on_load_checkpoint(saved)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])  # with the reference policy, and without
def test_a_resumed_lora_run_equals_the_run_that_was_never_stopped(algorithm, command, toy, tmp_path):
    options = [
        *toy, f"algorithm={algorithm}", "model.lora.r=4", "model.lora.alpha=16",
        "model.lora.target_modules=[q_proj,v_proj]", "update.minibatches=2", "optimizer.lr=0.05",
        "reward=[random]", "reward.random.rate=0.5", "eval.reward=exact",
    ]  # fmt: skip
    assert command(*options, f"hydra.run.dir={tmp_path / 'whole'}")[0] == 0
    assert command(*options, f"hydra.run.dir={tmp_path / 'part'}", "trainer.max_epochs=2")[0] == 0
    code, out, _ = command(f"resume={tmp_path / 'part'}", "trainer.max_epochs=3")
    assert code == 0 and "resuming from" in out
    whole, part = read(tmp_path / "whole" / "metrics.csv"), read(tmp_path / "part" / "metrics.csv")
    timed = ("time/", "speed/", "val/")
    assert [{k: v for k, v in row.items() if not k.startswith(timed)} for row in whole] == [
        {k: v for k, v in row.items() if not k.startswith(timed)} for row in part
    ]
    if algorithm == "grpo":
        kl = [float(row["policy/kl"]) for row in whole]
        assert abs(kl[0]) < 1e-6 and max(kl[1:]) > 1e-6
    for number in (1, 2, 3):
        name = f"rollouts/{number:06d}.jsonl"
        assert (tmp_path / "whole" / name).read_text() == (tmp_path / "part" / name).read_text()
    exported = [tmp_path / run / "checkpoints" / "model" for run in ("whole", "part")]
    assert (exported[0] / "model.safetensors").read_bytes() == (exported[1] / "model.safetensors").read_bytes()
    assert not (exported[0] / "adapter_config.json").exists()
    start, end = (load_policy(path).state_dict() for path in (toy[0].partition("=")[2], str(exported[0])))
    assert {name.split(".")[-2] for name in end if not torch.equal(end[name], start[name])} == {"q_proj", "v_proj"}


def test_lora_on_top_of_an_adapter_folder_through_the_command(command, toy, tmp_path):
    base = Path(toy[0].partition("=")[2])
    sft = adapter_folder(tmp_path / "sft", base)
    for name, options in (("lora", ["model.lora.r=2"]), ("full", [])):
        code, _, err = command(
            *toy[1:], f"model.path={sft}", *options, "trainer.max_epochs=1", f"hydra.run.dir={tmp_path / name}"
        )
        assert code == 0, err
        assert abs(float(read(tmp_path / name / "metrics.csv")[0]["policy/kl"])) < 1e-6
        assert load_policy(str(tmp_path / name / "checkpoints" / "model")).config.vocab_size == 11


@pytest.mark.parametrize("model", ["tiny", "hf", "smollm2_135m"])
def test_every_model_option_takes_the_same_words(model):
    from grpo_lightning.config import compose_checked

    path = ["model.path=x"] if model == "hf" else []
    options = ["model.lora.r=16", "model.lora.alpha=32", "model.lora.target_modules=[q_proj,v_proj]"]
    cfg = compose_checked([f"model={model}", *path, *options])
    assert dict(cfg.model.lora) == {"r": 16, "alpha": 32, "target_modules": ["q_proj", "v_proj"]}
    assert compose_checked([f"model={model}", *path]).model.lora.r is None
    for wrong, match in (
        ("model.lora.r=many", "model.lora.r"),
        ("model.lora.r=1.5", "model.lora.r"),
        ("model.lora.alpha=[1]", "model.lora.alpha"),
        ("+model.lora.dropout=0.1", "model.lora.dropout"),
        ("model.lora=null", "model.lora"),
    ):
        with pytest.raises(UsageError, match=match):
            compose_checked([f"model={model}", *path, wrong])
