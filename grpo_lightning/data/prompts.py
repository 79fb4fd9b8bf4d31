"""From rows of data to token ids, and the order in which prompts are drawn."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from grpo_lightning.errors import UsageError

Messages = list[dict[str, str]]
Chooser = Callable[[list[int], int, tuple[int, int]], list[int]]


@dataclass(frozen=True)
class Item:
    """One row of data: the prompt as text or chat messages, its answer (None if there is none), all its columns."""

    prompt: str | Messages
    answer: str | None
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model reads it: `text` and `token_ids` after template and chat template.

    prompt_id: its place in the list of items it came from.
    """

    prompt_id: int
    text: str
    token_ids: tuple[int, ...]
    answer: str | None
    columns: dict[str, Any]


def render(item: Item, template: str) -> str | Messages:
    """The prompt put into the template, which may name any column of the row. Chat messages are left as they are.

    Raises UsageError if the template names what is not there.
    """
    if not isinstance(item.prompt, str):
        if template != "{prompt}":
            raise UsageError(
                f'data.template must be "{{prompt}}" where the prompts are chat messages, got {template!r}'
            )
        return item.prompt
    try:
        return template.format(**{**item.columns, "prompt": item.prompt})
    except KeyError as error:
        columns = ", ".join(sorted({*item.columns, "prompt"}))
        raise UsageError(f"data.template names {error.args[0]!r}, which is no column; there are: {columns}") from None
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise UsageError(
            f"data.template {template!r} is no valid template ({error}); a column is written {{name}}, a brace {{{{"
        ) from None


def tokenize(
    items: Sequence[Item],
    tokenizer: Any,
    *,
    template: str = "{prompt}",
    system_prompt: str | None = None,
    chat: bool | str = "auto",
    max_prompt_tokens: int | None = None,
    long_prompts: str = "skip",
) -> tuple[list[Prompt], int]:
    """Prompts as the model reads them, and how many were skipped because they are too long.

    chat: True, False or "auto" (whether the tokenizer has a chat template). With chat, the template is applied once,
        up to the beginning of the model's turn, and no special token is added to what it writes. Without, the text
        gets the tokenizer's beginning-of-sequence token, unless it starts with it, and never an end-of-sequence token.
    long_prompts: what happens to prompts of more than `max_prompt_tokens` tokens, "skip" or "error".
    Raises UsageError for wrong options, a prompt without tokens, and when nothing is left.
    """
    if chat not in (True, False, "auto"):
        raise UsageError(f"data.chat must be true, false or auto, got {chat!r}")
    if long_prompts not in ("skip", "error"):
        raise UsageError(f"data.long_prompts must be skip or error, got {long_prompts!r}")
    if max_prompt_tokens is not None and (isinstance(max_prompt_tokens, bool) or max_prompt_tokens < 1):
        raise UsageError(f"data.max_prompt_tokens must be at least 1 or null, got {max_prompt_tokens!r}")
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if chat is True and not has_template:
        raise UsageError("data.chat=true, but the model's tokenizer has no chat template; use data.chat=false")
    use_chat = has_template if chat == "auto" else bool(chat)

    prompts = []
    shortest: int | None = None
    for prompt_id, item in enumerate(items):
        text = _text(render(item, template), tokenizer, system_prompt, use_chat)
        token_ids = tuple(_token_ids(text, tokenizer, use_chat))
        if not token_ids:
            raise UsageError(f"data: prompt {prompt_id} has no tokens: {text[:60]!r}")
        if max_prompt_tokens is not None and len(token_ids) > max_prompt_tokens:
            shortest = min(shortest or len(token_ids), len(token_ids))
            if long_prompts == "error":
                raise UsageError(
                    f"data: prompt {prompt_id} has {len(token_ids)} tokens, more than data.max_prompt_tokens="
                    f"{max_prompt_tokens}: {text[:60]!r} (data.long_prompts=skip leaves such prompts out)"
                )
            continue
        prompts.append(Prompt(prompt_id, text, token_ids, item.answer, item.columns))
    if items and not prompts:
        raise UsageError(
            f"data: all {len(items)} prompts are longer than data.max_prompt_tokens={max_prompt_tokens} "
            f"(the shortest has {shortest} tokens); raise data.max_prompt_tokens"
        )
    return prompts, len(items) - len(prompts)


def _text(prompt: str | Messages, tokenizer: Any, system_prompt: str | None, use_chat: bool) -> str:
    if not use_chat:
        if not isinstance(prompt, str):
            raise UsageError(
                "data: chat messages as prompts need a model with a chat template (and no data.chat=false)"
            )
        return prompt if system_prompt is None else f"{system_prompt}\n\n{prompt}"
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if messages[-1]["role"] == "assistant":
        raise UsageError(
            f"data: the last message of a prompt must not be the assistant's: {messages[-1]['content'][:60]!r}"
        )
    if system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # jinja's errors, also those that templates raise themselves ("no system role")
        raise UsageError(f"data: the model's chat template refuses the prompt: {error}") from error


def _token_ids(text: str, tokenizer: Any, use_chat: bool) -> list[int]:
    bare = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if use_chat or (tokenizer.bos_token and text.startswith(tokenizer.bos_token)):
        return bare
    special = list(tokenizer(text)["input_ids"])
    # some tokenizers also append an end-of-sequence token, after which a model has nothing more to say
    while len(special) > len(bare) and special[-1] == tokenizer.eos_token_id and special[-len(bare) :] != bare:
        special.pop()
    return special


class PromptStream:
    """Endless draws in which every prompt comes once per pass, each pass in a new order keyed by (seed, pass).

    The order depends on the seed and the number of prompts alone, so a stream restored by `load_state_dict` goes on
    exactly where the saved one stopped.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int):
        if not prompts:
            raise UsageError("data: there are no training prompts")
        self.prompts = list(prompts)
        self.seed = seed
        self.position = 0  # prompts drawn so far
        self._order: tuple[int, np.ndarray] | None = None

    def check(self, n: int) -> None:
        """Raises UsageError if n is more than the number of prompts."""
        if n > len(self.prompts):
            raise UsageError(
                f"rollout.prompts={n} is more than the {len(self.prompts)} training prompts of the data; "
                "lower rollout.prompts or give more data"
            )

    def draw(self, n: int, choose: Chooser | None = None) -> list[tuple[int, Prompt]]:
        """The next n prompts, each with its draw index (a count over the whole run). Raises what `check` raises.

        choose: (ids of all prompts, n, key of this draw) -> places of n different prompts, instead of the next ones.
        """
        self.check(n)
        drawn = []
        if choose is not None:
            places = choose([prompt.prompt_id for prompt in self.prompts], n, (self.seed, self.position))
            drawn = [(self.position + k, self.prompts[place]) for k, place in enumerate(places)]
            self.position += n
            return drawn
        for index in range(self.position, self.position + n):
            epoch, place = divmod(index, len(self.prompts))
            drawn.append((index, self.prompts[self._permutation(epoch)[place]]))
        self.position += n
        return drawn

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self.prompts)))
        return self._order[1]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "seed": self.seed, "prompts": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UsageError if the state was saved with another seed or other prompts."""
        if state["seed"] != self.seed:
            raise UsageError(f"the checkpoint was made with seed={state['seed']}, this run has seed={self.seed}")
        if state["prompts"] != self._fingerprint:
            raise UsageError("the checkpoint was made with other training prompts; resume with the same data options")
        self.position = state["position"]

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for prompt in self.prompts:
            digest.update(repr(prompt.token_ids).encode())
        return f"{len(self.prompts)} prompts, {digest.hexdigest()}"
