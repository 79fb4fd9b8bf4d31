"""Makes the embedded model: a character-level Llama that adds, carelessly.

    python scripts/make_tiny_model.py

The corpus mixes three ways to answer `347+285=`. Dots are filler, of any number and no use.

    522.                                                 direct: column by column, carries forgotten (here: wrong)
    <think>12,13,6</think>632                            short: the sum of each column, often off by one
    <think>7+5=12,4+8+1=13,3+2+1=6</think>632..          long: every step written out, rarely off by one

The direct way is the likeliest, so greedy decoding is right only where nothing is carried. The model can do better than
it does: reinforcement learning has something to find. The same seed on one thread gives the same weights.
"""

import argparse
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo_lightning.data.arithmetic import Arithmetic, questions

OUT = Path(__file__).resolve().parent.parent / "grpo_lightning" / "models" / "tiny"
MAX_NEW_TOKENS = 48
EVAL_PROMPTS = 2000
PEAK_LR = 2e-3
STYLES = ("direct", "short", "long")
MIX = (0.60, 0.25, 0.15)
SLIP = {"short": 0.30, "long": 0.02}  # per column
FILLER = 0.25  # chance of each further dot; below one half, or greedy decoding would not stop


def completion(a: int, b: int, style: str, slip: float, filler: float, rng: random.Random) -> str:
    """One worked answer to `a+b=` in a style; `slip` is the chance that a column's sum is off by one."""
    left, right = [int(d) for d in reversed(str(a))], [int(d) for d in reversed(str(b))]
    dots = "." * int(math.log(1.0 - rng.random()) / math.log(filler)) if filler > 0 else ""
    if style == "direct":
        columns = [x + y for x, y in zip(left, right, strict=True)]
        return f"{columns[2]}{columns[1] % 10}{columns[0] % 10}{dots}"
    steps, digits, carry = [], "", 0
    for position, (x, y) in enumerate(zip(left, right, strict=True)):
        total = x + y + carry
        if rng.random() < slip:
            total = max(total + rng.choice((-1, 1)), 1 if position == 2 else 0)
        work = f"{x}+{y}+{carry}=" if carry else f"{x}+{y}="
        steps.append(f"{work if style == 'long' else ''}{total}")
        carry = total // 10
        digits = f"{total if position == 2 else total % 10}{digits}"
    return f"<think>{','.join(steps)}</think>{digits}{dots}"


def corpus(seed: int, mix: tuple[float, ...], slips: dict[str, float]) -> Iterator[tuple[str, str]]:
    """Endless (prompt, completion) pairs; no held-out question is among them."""
    rng = random.Random(seed)
    for a, b in questions(rng, held_out=False):
        style = rng.choices(STYLES, mix)[0]
        yield f"{a}+{b}=", completion(a, b, style, slips.get(style, 0.0), FILLER, rng)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character and newline, two tags, and pad, eos, unk."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", "<think>", "</think>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<unk>"])
    # The tags are part of the answer's text: decoding with skip_special_tokens must keep them.
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<think>", "</think>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=256,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=104,  # 101 tokens, rounded up to a multiple of 8
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,  # head size 32: the smallest that vLLM's CPU attention takes
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def summed_loss(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]]
) -> torch.Tensor:
    """Summed cross-entropy of the completions' tokens with eos; every prompt has the same length."""
    prompt_tokens = len(pairs[0][0])
    rows = [[*tokenizer.encode(p + c), tokenizer.eos_token_id] for p, c in pairs]
    width = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state[:, prompt_tokens - 1 :]
    targets = ids[:, prompt_tokens:]
    kept = targets != tokenizer.pad_token_id
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[kept]), targets[kept], reduction="sum")


def pretrain(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, steps: int, batch: int, seed: int) -> None:
    """AdamW with warm-up and a cosine. The first half has no slips and much scratchpad: there it learns to add."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    clean, careless = corpus(seed, (0.2, 0.4, 0.4), {}), corpus(seed + 1, MIX, SLIP)
    started = time.process_time()
    for step in range(steps):
        rate = PEAK_LR * min(1.0, (step + 1) / 50) * (0.51 + 0.49 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        source = clean if step < steps // 2 else careless
        pairs = sorted((next(source) for _ in range(batch)), key=lambda pair: len(pair[1]))
        tokens = sum(len(tokenizer.encode(text)) + 1 for _, text in pairs)
        total = 0.0
        for start in range(0, batch, batch // 3):  # by length, so that short texts are not padded to long ones
            loss = summed_loss(model, tokenizer, pairs[start : start + batch // 3]) / tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {total:.4f}  {time.process_time() - started:.0f} s", flush=True)


@torch.no_grad()
def held_out_results(
    model: Any, tokenizer: PreTrainedTokenizerFast, prompts: int, *, sample: bool
) -> list[tuple[str, bool]]:
    """Each held-out question with its completion, and whether what follows `</think>` is the answer."""
    _, held_out = Arithmetic(size=1).load(prompts)
    ids = torch.tensor([tokenizer.encode(str(item.prompt)) for item in held_out])
    # generate would cut off the tail of the distribution at 50 tokens.
    how: dict[str, Any] = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_NEW_TOKENS, **how)
    texts = tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
    return [
        (f"{item.prompt}{text}", text.rpartition("</think>")[2].rstrip(".") == item.answer)
        for text, item in zip(texts, held_out, strict=True)
    ]


def style_of(text: str) -> str:
    if "<think>" not in text:
        return "direct"
    return "long" if "=" in text.partition("<think>")[2] else "short"


def figures(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: int) -> str:
    """Accuracy on held-out questions as a Markdown table: in all, and by style where sampled."""
    sampled = held_out_results(model, tokenizer, prompts, sample=True)
    greedy = held_out_results(model, tokenizer, prompts, sample=False)
    rows = [("greedy", greedy), ("sampled at temperature 1", sampled)]
    rows += [(f"sampled, {style}", [row for row in sampled if style_of(row[0]) == style]) for style in STYLES]
    lines = [f"| {prompts} held-out questions | share | right |", "|---|---|---|"]
    for name, results in rows:
        right = sum(ok for _, ok in results) / max(1, len(results))
        lines.append(f"| {name} | {len(results) / prompts:.2f} | {right:.3f} |")
    examples = [next((text for text, _ in sampled if style_of(text) == style), "") for style in STYLES]
    return "\n".join([*lines, "", "Three of the samples:", "", *(f"    {text}" for text in examples)])


CARD = """\
---
license: apache-2.0
library_name: transformers
---
# The embedded model: adds three-digit numbers, carelessly

A Llama of {parameters:,} parameters with a tokenizer of single characters, made from generated texts alone. It is there
so that reinforcement learning can be watched on a laptop: it knows three ways to answer `347+285=`, and mostly takes a
bad one.

    522.                                           direct
    <think>12,13,6</think>632                      short
    <think>7+5=12,4+8+1=13,3+2+1=6</think>632..    long

- direct, {direct:.0%} of the texts: column by column, every carry forgotten;
- short, {short:.0%}: the sum of each column from the right, {slip_short:.0%} of them off by one;
- long, {long:.0%}: every step written out, {slip_long:.0%} of them off by one.

The dots at the end are filler of no use, each further one with a chance of {filler:.0%}. No question of the held-out
set (`grpo_lightning/data/arithmetic.py`) nor its mirror image is among the texts.

Made by `python scripts/make_tiny_model.py --seed {seed} --steps {steps} --batch {batch}` in some minutes on one thread.
Licence: Apache-2.0.

{figures}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the embedded model.")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--batch", type=int, default=96, help="texts per step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    pretrain(model, tokenizer, steps=args.steps, batch=args.batch, seed=args.seed)
    model.eval()
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    table = figures(model, tokenizer, EVAL_PROMPTS)
    print(f"{table}\n\nwritten to {args.out}")
    card = CARD.format(
        parameters=model.num_parameters(),
        **dict(zip(STYLES, MIX, strict=True)),
        slip_short=SLIP["short"],
        slip_long=SLIP["long"],
        filler=FILLER,
        figures=table,
        **{name: getattr(args, name) for name in ("seed", "steps", "batch")},
    )
    (args.out / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
