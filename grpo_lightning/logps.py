"""Log-probabilities of completion tokens under a model, and the entropy of the distributions they were drawn from.

The model's trunk runs over packs of rows; its hidden states are cut to the positions that predict a completion token,
and only those are projected onto the vocabulary, a few at a time. The projection keeps nothing: the backward pass makes
the logits again. So no float tensor of [tokens, vocabulary] exists but of those few tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo_lightning.rollout.batch import PROMPT, Batch

LOGITS_AT_ONCE = 2**24  # 64 MB in float32
WINDOWS = ("sliding_window", "window_size", "attention_window_size", "attention_chunk_size", "attention_layers")


class TokenLogps(NamedTuple):
    """What a model says of the K completion tokens of a batch, put into place by `batch.spread`.

    logp [N, T] float32, with gradient where it is enabled; entropy [N, T] float32, in nats, with gradient where it was
    asked for; both 0 behind a row's end. hidden [K, D]: the hidden states that predicted the tokens, before the output
    layer.
    """

    logp: Tensor
    entropy: Tensor
    hidden: Tensor


class Traits(NamedTuple):
    """What `examine` found of a model.

    Attributes:
        plain_output: its logits are its trunk's last hidden states times the weight of its output layer, and no more.
        attention: None where rows cannot share a prompt; else what attending to one token costs, in parts of what
            the rest of the model costs for a token.
    """

    plain_output: bool
    attention: float | None


def token_logps(
    model: nn.Module, batch: Batch, temperature: float, traits: Traits, *, entropy_gradient: bool = False
) -> TokenLogps:
    """One forward pass over a batch.

    Args:
        model: a causal language model. traits: what `examine` says of it.
        temperature: of the sampling: logits are divided by it, for policy, old and reference alike.
        entropy_gradient: keep the graph of the entropy, which is a term of the loss.
    """
    output = output_layer(model)

    def readout(hidden: Tensor) -> tuple[Tensor, Tensor]:
        return _Readout.apply(hidden, output.weight, output.bias, batch.targets, temperature, entropy_gradient)

    if not traits.plain_output:
        logits, hidden = _own_logits(model, output, batch)
        parts = [
            _logp_and_entropy(some.float() / temperature, ids, entropy_gradient)
            for some, ids in zip(*(t.split(_at_once(logits.shape[-1])) for t in (logits, batch.targets)), strict=True)
        ]
        logp, entropy = (torch.cat(values) for values in zip(*parts, strict=True))
    elif isinstance(output.weight, DTensor):
        hidden, (logp, entropy) = _within_forward(model, output, batch, readout)
    else:
        hidden = hidden_states(trunk(model), batch, model).flatten(0, 1)[batch.places]
        logp, entropy = readout(hidden)
    return TokenLogps(batch.spread(logp), batch.spread(entropy), hidden)


def trunk(model: nn.Module) -> nn.Module:
    """The model without its output layer."""
    return cast(nn.Module, model.base_model)


def output_layer(model: nn.Module) -> Any:
    return model.get_output_embeddings()  # type: ignore[operator]


def hidden_states(part: nn.Module, batch: Batch, model: nn.Module) -> Tensor:
    """The last hidden states [B, S, D] of the trunk of `model`, or of one like it."""
    return cast(Tensor, part(**_inputs(batch, model)).last_hidden_state)


def _inputs(batch: Batch, model: nn.Module) -> dict[str, Any]:
    return {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "attention_mask": None if batch.segments is None else _mask(batch.segments, model),
        "use_cache": False,
    }


def _mask(segments: Tensor, model: nn.Module) -> Tensor:
    """What is added to the scores, [B, 1, S, S]: a token sees those before it, of its prompt and of its own row."""
    lines, columns = segments.unsqueeze(2), segments.unsqueeze(1)
    sees = ((columns == PROMPT) | (columns == lines)).tril().unsqueeze(1)
    # Not as booleans, which SDPA would turn into numbers, and keep, in every layer anew.
    device = segments.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else next(model.parameters()).dtype
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill(~sees, torch.finfo(dtype).min)


def _attention(model: nn.Module) -> str | None:
    return getattr(model.config, "_attn_implementation", None)


def _own_logits(model: nn.Module, output: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The logits [K, V] by the model's own forward pass, and the hidden states [K, D] that went into its output."""
    seen: list[Tensor] = []

    def cut(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(inputs[0].flatten(0, 1)[batch.places])
        return (seen[0].unsqueeze(0),)

    handle = output.register_forward_pre_hook(cut)
    try:
        logits: Tensor = model(**_inputs(batch, model)).logits
    finally:
        handle.remove()
    return logits.squeeze(0), seen[0]


def _within_forward(
    model: nn.Module, output: nn.Module, batch: Batch, readout: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The hidden states [K, D] and their readout, made inside the model's own forward pass: weights that are sharded
    over processes (FSDP) are whole only there."""
    made: list[tuple[Tensor, tuple[Tensor, Tensor]]] = []

    def read(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = inputs[0].flatten(0, 1)[batch.places]
        made.append((hidden, readout(hidden)))
        return (inputs[0][:, :1],)

    handle = output.register_forward_pre_hook(read)
    try:
        logits: Tensor = model(**_inputs(batch, model)).logits
    finally:
        handle.remove()
    hidden, (logp, entropy) = made[0]
    # FSDP prepares the backward pass of the outermost weights when a gradient comes to what the model returned.
    return hidden, (logp + 0 * logits.sum(), entropy)


def _at_once(vocabulary: int) -> int:
    return max(1, LOGITS_AT_ONCE // vocabulary)


def _logp_and_entropy(logits: Tensor, targets: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    """logp and entropy [K] of logits [K, V] float32."""
    best = logits.argmax(-1, keepdim=True)
    z = logits - logits.gather(-1, best)
    # The most likely token apart: the sum of the others keeps its digits where it is far below 1.
    others = z.exp().scatter(-1, best, 0.0)
    log_total = others.sum(-1).log1p()
    logp = z.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - log_total
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # A logit of -inf (a token the model rules out) has probability 0 and adds no entropy.
        entropy = log_total - (others * z.clamp(min=torch.finfo(z.dtype).min)).sum(-1) / (1 + others.sum(-1))
    return logp, entropy if entropy_gradient else entropy.detach()


class _Readout(torch.autograd.Function):
    """logp and entropy [K] float32 from hidden states [K, D]: the projection onto the vocabulary, a chunk at a time.

    With p = softmax(z), z = (W h + b) / temperature and the entropy H:  d logp_y / dz = 1[y] - p,
    dH / dz = -p (log p + H).  p is made again in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        device = hidden.device.type
        # Under autocast a product is in the lower precision, as the model's own output layer would be.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        logp, entropy, normaliser = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        with torch.autocast(device, enabled=False):
            factor = weight.to(dtype)
            for part in _parts(len(hidden), len(weight)):
                z = _logits(hidden[part].to(dtype), factor, bias, temperature)
                top, best = z.max(-1, keepdim=True)
                # The most likely token apart: the sum of the others keeps its digits where it is far below 1.
                others = z.sub_(top).exp().scatter_(-1, best, 0.0)
                rest = others.sum(-1)
                log_total = rest.log1p()
                normaliser[part] = log_total + top.squeeze(-1)
                logp[part] = z.gather(-1, targets[part].unsqueeze(-1)).squeeze(-1) - log_total
                # H = log sum e^(z - top) - sum p (z - top); the sum is one product, without a tensor of its own.
                entropy[part] = log_total - torch.linalg.vecdot(others, z) / (1 + rest)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy)
        ctx.dtype, ctx.temperature, ctx.entropy_gradient = dtype, temperature, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, d_logp: Tensor, d_entropy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if wants_hidden else None
        # In float32 also where the weight is in less: it adds up over the parts.
        precision = torch.promote_types(weight.dtype, torch.float32)
        d_weight = torch.zeros_like(weight, dtype=precision) if wants_weight else None
        d_bias = torch.zeros_like(bias) if wants_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            factor = weight.to(ctx.dtype)
            for part in _parts(len(hidden), len(weight)):
                h = hidden[part].to(ctx.dtype)
                logs = _logits(h, factor, bias, ctx.temperature).sub_(normaliser[part].unsqueeze(-1))
                outer = -d_logp[part].unsqueeze(-1)
                if ctx.entropy_gradient:
                    outer = outer - d_entropy[part].unsqueeze(-1) * (logs + entropy[part].unsqueeze(-1))
                d_z = logs.exp_().mul_(outer)
                d_z.scatter_add_(-1, targets[part].unsqueeze(-1), d_logp[part].unsqueeze(-1))
                if ctx.temperature != 1:
                    d_z /= ctx.temperature
                d_z = d_z.to(ctx.dtype)
                if d_hidden is not None:
                    d_hidden[part] = (d_z @ factor).to(hidden.dtype)
                if d_weight is not None:
                    if ctx.dtype == d_weight.dtype:
                        d_weight.addmm_(d_z.T, h)
                    else:
                        d_weight += d_z.T @ h
                if d_bias is not None:
                    d_bias += d_z.sum(0)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        return d_hidden, d_weight, d_bias, None, None, None


def _parts(tokens: int, vocabulary: int) -> list[slice]:
    step = _at_once(vocabulary)
    return [slice(begin, begin + step) for begin in range(0, tokens, step)]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """[chunk, V] float32, divided by the temperature; a tensor of its own, which may be written to."""
    z = (hidden @ weight.T).float()
    if bias is not None:
        z += bias
    return z if temperature == 1 else z.div_(temperature)


@torch.no_grad()
def examine(model: nn.Module) -> Traits:
    """Find out by trial, on nine tokens, how far a model's forward pass can be taken apart."""
    output = output_layer(model)
    device, vocabulary = output.weight.device, output.weight.shape[0]
    ids = torch.arange(1, 10, device=device) % vocabulary
    was_training = model.training
    model.eval()
    try:
        # Prompt 0 1 2, completions 3 4 5 and 6 7 8, apart and as one pack.
        rows = torch.stack([ids[[0, 1, 2, 3, 4, 5]], ids[[0, 1, 2, 6, 7, 8]]])
        positions = torch.arange(6, device=device).expand(2, 6)
        own = model(input_ids=rows, position_ids=positions, use_cache=False).logits.float()
        plain = _is_plain(model, {"input_ids": rows, "position_ids": positions, "use_cache": False})
        return Traits(plain, _attention_cost(model) if _shares(model, ids, own) else None)
    finally:
        model.train(was_training)


def _is_plain(model: nn.Module, inputs: dict[str, Any]) -> bool:
    """Whether the logits are hidden states times the weight of the output layer, also where they are as large as 100:
    a cap does not show on small ones."""
    output = output_layer(model)
    hidden = None
    if type(output) is nn.Linear:
        hidden = getattr(trunk(model)(**inputs), "last_hidden_state", None)
    if hidden is None:
        return False
    large = 100 * hidden / nn.functional.linear(hidden, output.weight).abs().max().clamp(min=1e-6)
    handle = output.register_forward_pre_hook(lambda *_: (large,))
    try:
        own = model(**inputs).logits.float()
    finally:
        handle.remove()
    made = nn.functional.linear(large, output.weight, output.bias).float()
    return own.shape == made.shape and bool(made.isfinite().all() and torch.allclose(made, own, rtol=1e-3, atol=1e-3))


def _shares(model: nn.Module, ids: Tensor, own: Tensor) -> bool:
    """Whether the model heeds a mask of [B, 1, S, S], so that two rows behind one prompt do not see each other."""
    # Other kinds of attention take no such mask; a window or a chunk, which nine tokens do not show, would be lost
    # where one is given, or be counted along the pack by a model that makes its masks itself.
    config: Any = model.config
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    windowed = any(getattr(config, name, None) for name in WINDOWS) and getattr(config, "use_sliding_window", True)
    makes_its_own = not getattr(model, "_supports_attention_backend", False)
    if _attention(model) not in ("sdpa", "eager") or set(kinds) != {"full_attention"} or windowed or makes_its_own:
        return False
    segments = torch.tensor([[PROMPT] * 3 + [1] * 3 + [2] * 3], device=ids.device)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 3, 4, 5]], device=ids.device)
    expected = torch.cat([own[0], own[1, 3:]])
    try:
        # With the mask, and with one that lets the second row see the first: what that changes is the measure.
        off, mixed = (
            model(input_ids=ids[None], position_ids=positions, attention_mask=_mask(which, model), use_cache=False)
            .logits[0].float().sub(expected).abs().max()
            for which in (segments, torch.zeros_like(segments))
        )  # fmt: skip
    except Exception:  # whatever a model of another make says to a mask that it does not know
        return False
    return bool(off < 1e-2 * mixed)


def _attention_cost(model: nn.Module) -> float:
    """FLOP of comparing a token with one other and taking its value, in parts of the trunk's FLOP for a token."""
    config: Any = model.config
    heads = getattr(config, "num_attention_heads", 0)
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // max(1, heads))
    weights = sum(p.numel() for p in trunk(model).parameters() if p.ndim == 2)
    embeddings = model.get_input_embeddings().weight.numel()  # type: ignore[operator]
    return 2 * config.num_hidden_layers * width / max(1, weights - embeddings)
