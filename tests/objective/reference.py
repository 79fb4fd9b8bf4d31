"""The objective once more, in plain Python loops straight from the formulas: what the tensors must equal."""

import math
from collections import defaultdict


def advantages(name, rewards, ids, lengths, *, eps=1e-6, unbiased=True, gamma=1.0, kl=None):
    """Rows of advantages (a list of `lengths[i]` numbers each); rewards may be None."""
    rewards = list(rewards)
    if kl is not None and name != "reinforce_pp":
        rewards = [r if r is None else r - sum(k) for r, k in zip(rewards, kl, strict=True)]
    if name == "reinforce_pp":
        return _reinforce_pp(rewards, lengths, eps, unbiased, gamma, kl)
    groups = defaultdict(list)
    for r, g in zip(rewards, ids, strict=True):
        if r is not None:
            groups[g].append(r)
    everything = [r for r in rewards if r is not None]
    rows = []
    for r, g, n in zip(rewards, ids, lengths, strict=True):
        mine = groups[g]
        if r is None:
            a = 0.0
        elif name == "none":
            a = r
        elif max(mine) == min(mine):
            a = 0.0
        else:
            mean = sum(mine) / len(mine)
            if name == "dr_grpo":
                a = r - mean
            elif name == "rloo":
                a = r - (sum(mine) - r) / (len(mine) - 1)
            else:
                a = (r - mean) / (_std({"grpo": mine, "batch_std": everything}[name], unbiased) + eps)
        rows.append([a] * n)
    return rows


def _reinforce_pp(rewards, lengths, eps, unbiased, gamma, kl):
    returns = []
    for i, (r, n) in enumerate(zip(rewards, lengths, strict=True)):
        per_token = [(r if s == n - 1 else 0.0) - (kl[i][s] if kl else 0.0) for s in range(n)] if r is not None else []
        returns.append([sum(gamma ** (s - t) * per_token[s] for s in range(t, n)) for t in range(len(per_token))])
    flat = [v for row in returns for v in row]
    mean, std = sum(flat) / len(flat), _std(flat, unbiased)
    varied = max(flat) != min(flat)
    return [
        [(v - mean) / (std + eps) if varied else 0.0 for v in row] if r is not None else [0.0] * n
        for row, r, n in zip(returns, rewards, lengths, strict=True)
    ]


def _std(values, unbiased):
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / max(len(values) - int(unbiased), 1))


def weights(name, lengths, ids, constant=None):
    """The weight of every token of row i, one number per row."""
    rows = sum(n > 0 for n in lengths)
    per_group = defaultdict(int)
    for n, g in zip(lengths, ids, strict=True):
        per_group[g] += n
    prompts = sum(n > 0 for n in per_group.values())
    result = []
    for n, g in zip(lengths, ids, strict=True):
        if n == 0:
            result.append(0.0)
        elif name == "constant":
            result.append(1 / (rows * constant))
        else:
            divisors = {
                "sequence": rows * n,
                "token": sum(lengths),
                "prompt": prompts * per_group[g],
                "sequence_sum": rows,
            }
            result.append(1 / divisors[name])
    return result


def surrogate(name, ratio, a, logp, values):
    def ppo(rho, low, high):
        return -min(rho * a, min(max(rho, 1 - low), 1 + high) * a)

    if name == "none":
        return -a * logp
    if name == "unclipped":
        return -ratio * a
    if name == "symmetric":
        return ppo(ratio, values["epsilon"], values["epsilon"])
    low, high = values["epsilon_low"], values["epsilon_high"]
    if name == "dual" and a < 0:
        return min(ppo(ratio, low, high), -values["c"] * a)
    if name == "two_sided":
        return -min(min(ratio, values["delta"]) * a, min(max(ratio, 1 - low), 1 + high) * a)
    return ppo(ratio, low, high)


def kl(name, logp, ref):
    d = ref - logp
    return {"none": 0.0, "k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[name]


def loss(rows, w, *, clip, values, ratio, kl_name, beta):
    """rows: lists of (logp, old, a, ref) per token; w: weight per row."""
    total = 0.0
    for row, weight in zip(rows, w, strict=True):
        log_ratios = [logp - old for logp, old, _, _ in row]
        mean = sum(log_ratios) / max(len(row), 1)
        for (logp, _, a, ref), x in zip(row, log_ratios, strict=True):
            rho = math.exp(max(-20.0, min(20.0, mean if ratio == "sequence" else x)))
            total += weight * (surrogate(clip, rho, a, logp, values) + beta * kl(kl_name, logp, ref))
    return total
