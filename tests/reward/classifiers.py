"""Random reward models with a tokenizer of single characters."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
)

CHARACTERS = ["<bos>", "<eos>", "<sep>", *"0123456789+=,.;\nabcdefghijklmnopqrstuvwxyz <>/:A"]
CHAT = "{% for m in messages %}{{ m.role[0] }}:{{ m.content | trim }}<eos>{% endfor %}"


def tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="a"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", additional_special_tokens=["<sep>"],
        chat_template=chat_template,
    )  # fmt: skip


def save(folder: Path, kind: type = LlamaForSequenceClassification, *, chat: str | None = None, **changes) -> str:
    """A model of this kind in the folder, with its tokenizer. Llamas have no padding token."""
    torch.manual_seed(0)
    common = dict(
        vocab_size=len(CHARACTERS), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, initializer_range=0.3, num_labels=1,
    )  # fmt: skip
    if kind is BertForSequenceClassification:
        config = BertConfig(**common | {"pad_token_id": 1} | changes)
    else:
        config = LlamaConfig(**common | {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None} | changes)
    kind(config).save_pretrained(folder)
    tokenizer(chat).save_pretrained(folder)
    return str(folder)


def token_classifier(folder: Path, **changes) -> str:
    return save(folder, LlamaForTokenClassification, **{"num_labels": 2} | changes)
