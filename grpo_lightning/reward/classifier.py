"""A transformers classification model that reads texts in batches, for `reward=model` and `reward=process_model`."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from grpo_lightning.errors import UsageError
from grpo_lightning.reward.score import Unscored


class Classifier:
    """The configuration and the tokenizer are loaded at once, the weights with the first batch, where they are needed.

    option: "reward.model", for instance, for error messages. head: "sequence" or "token".
    path: a folder or an id of the hub. tokens: about as many tokens go through the model at a time, padding included.
    device: "auto" (this process's GPU, or the CPU), or a device of torch. bf16: weights in bfloat16, else float32.
    """

    def __init__(self, option: str, head: str, path: str | None, *, tokens: int, device: str, bf16: bool):
        if path is None:
            raise UsageError(f"{option}.path is needed: a folder or hub id of a reward model")
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise UsageError(f"{option}.tokens must be a whole number from 1, got {tokens!r}")
        try:
            self._device = None if device == "auto" else torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise UsageError(f"{option}.device must be auto, cpu, cuda, cuda:1, ..., got {device!r}") from error
        self.option, self.path, self._head, self._tokens = option, path, head, tokens
        self._class = AutoModelForSequenceClassification if head == "sequence" else AutoModelForTokenClassification
        self._dtype = torch.bfloat16 if bf16 else torch.float32
        self.config: Any = self._loaded(AutoConfig)
        self.tokenizer: Any = self._loaded(AutoTokenizer)
        self._model: Any = None

    def _loaded(self, what: Any, **options: Any) -> Any:
        try:
            return what.from_pretrained(self.path, **options)
        except Exception as error:  # a wrong path, a damaged file, no network: all the user's to mend
            detail = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UsageError(f"{self.option}.path={self.path} cannot be loaded: {detail}") from error

    @property
    def model(self) -> Any:
        if self._model is None:
            model, found = self._loaded(self._class, dtype=self._dtype, output_loading_info=True)
            if found["missing_keys"]:  # transformers would go on with random numbers for them
                missing = ", ".join(sorted(found["missing_keys"]))
                raise UsageError(f"{self.option}.path={self.path} is no {self._head} classifier: it has no {missing}")
            self._model = model.to(self._device or own_device())  # in evaluation mode
        return self._model

    def ids(self, text: str, chat: bool) -> list[int]:
        """Token ids with the model's special tokens, unless a chat template has put them into the text."""
        return list(self._encoded(text, chat)["input_ids"])

    def ids_and_starts(self, text: str, chat: bool) -> tuple[list[int], list[int]]:
        """The same, and where in the text each token begins, -1 for a token that does not stand there."""
        encoded = self._encoded(text, chat, return_offsets_mapping=True)
        return list(encoded["input_ids"]), [a if a < b else -1 for a, b in encoded["offset_mapping"]]

    def _encoded(self, text: str, chat: bool, **options: Any) -> Any:
        begun = bool(self.tokenizer.bos_token) and text.startswith(self.tokenizer.bos_token)
        return self.tokenizer(text, add_special_tokens=not (chat or begun), **options)

    @torch.inference_mode()
    def logits(self, rows: Sequence[list[int]]) -> list[Tensor | Unscored]:
        """[labels] for each row, or [tokens and padding, labels] of a token classifier, as float32 on the CPU.

        An Unscored stands for a row without tokens or with more than the model has positions for.
        """
        limit = getattr(self.config.get_text_config(), "max_position_embeddings", None) or 2**62
        results: list[Tensor | Unscored] = [Unscored("the text has no tokens")] * len(rows)
        for i, row in enumerate(rows):
            if len(row) > limit:
                results[i] = Unscored(f"the text has {len(row)} tokens, and {self.path} reads {limit} at most")
        fitting = sorted((i for i, row in enumerate(rows) if 0 < len(row) <= limit), key=lambda i: -len(rows[i]))
        while fitting:
            count = max(1, self._tokens // len(rows[fitting[0]]))
            batch, fitting = fitting[:count], fitting[count:]
            for i, logits in zip(batch, self._forward([rows[i] for i in batch]), strict=True):
                results[i] = logits
        return results

    def _forward(self, rows: list[list[int]]) -> list[Tensor]:
        model, config = self.model, self.config.get_text_config()
        width, pad = max(map(len, rows)), config.pad_token_id
        if pad is None and len(rows) > 1:
            # A decoder reads its verdict off the last token that is not the padding's: an id that none of these rows
            # has makes that the last token of each, as it is when a row comes alone.
            used = {token for row in rows for token in row}
            pad = next((token for token in range(config.vocab_size) if token not in used), None)
            if pad is None:
                return [logits for row in rows for logits in self._forward([row])]
        model.config.get_text_config().pad_token_id = pad
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=model.device)
        lengths = torch.tensor([len(row) for row in rows], device=model.device)
        mask = (torch.arange(width, device=model.device) < lengths[:, None]).long()
        return list(model(input_ids=ids, attention_mask=mask).logits.float().cpu())


def own_device() -> torch.device:
    """This process's GPU, or the CPU. (torch.cuda.current_device() is the first GPU in every new thread.)"""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0
    return torch.device("cuda", int(rank) % torch.cuda.device_count())


def use_chat(option: str, chat: bool | str, question: str | None, tokenizer: Any) -> bool:
    """Whether the texts get the reward model's chat template. Raises UsageError if they should and cannot."""
    if chat not in (True, False, "auto"):
        raise UsageError(f"{option}.chat must be true, false or auto, got {chat!r}")
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if chat is True and not has_template:
        raise UsageError(f"{option}.chat=true, but the reward model's tokenizer has no chat template")
    chat = has_template if chat == "auto" else bool(chat)
    if chat and question is None:
        raise UsageError(
            f"{option}.question is needed for the reward model's chat template: the column of the data with the "
            f"question ({option}.chat=false gives it the prompt and the completion as the policy reads them)"
        )
    if not chat and question is not None:
        raise UsageError(f"{option}.question has no effect without a chat template: leave it out")
    return chat


def questions(option: str, name: str, prompts: list[str], columns: dict[str, list[Any]]) -> list[Any]:
    """The column of that name, text or chat messages; the prompts as the policy read them where none is named so."""
    offered = {"prompt": prompts, **columns}
    if name not in offered:
        raise UsageError(f"{option}.question={name} is no column of the data; there are: {', '.join(sorted(offered))}")
    return offered[name]


def in_chat(tokenizer: Any, question: Any, completion: str) -> str:
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
    return str(tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": completion}], tokenize=False))
