"""Data: where prompts and answers come from, and the prompts as the model reads them."""

from grpo_lightning.data.prompts import Item, Prompt, PromptStream, tokenize

__all__ = ["Item", "Prompt", "PromptStream", "tokenize"]
