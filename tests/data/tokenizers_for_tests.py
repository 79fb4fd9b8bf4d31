"""Character tokenizers as transformers makes them, with and without a chat template and automatic special tokens."""

import string

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHAT = (
    "{% for m in messages %}"
    "{% if loop.first %}{{ bos_token }}{% endif %}"
    "{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tokenizer(chat_template: str | None = None, adds: str = "") -> PreTrainedTokenizerFast:
    """adds: "bos" and/or "eos", what the tokenizer itself puts around a text."""
    names = ["<s>", "</s>", "<unk>", *string.printable]
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    single = ("<s> " if "bos" in adds else "") + "$A" + (" </s>" if "eos" in adds else "")
    core.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
    made.chat_template = chat_template
    return made
