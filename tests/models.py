"""Small random models for tests."""

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

VOCABULARY = 11


def llama(seed: int = 0, **changes: object) -> torch.nn.Module:
    torch.manual_seed(seed)
    options = dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.5, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(LlamaConfig(**(options | changes))).eval()


def gpt2(seed: int = 0, **changes: object) -> torch.nn.Module:
    """Absolute positions: wrong position ids under padding show."""
    torch.manual_seed(seed)
    options = dict(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=128, initializer_range=0.5)
    return AutoModelForCausalLM.from_config(GPT2Config(**(options | changes), bos_token_id=2, eos_token_id=2)).eval()
