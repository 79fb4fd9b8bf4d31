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
                "luspo": rows,
                "dcpo": n,
            }
            result.append(1 / divisors[name])
    return result


def surrogate(name, ratio, a, logp, old, values):
    def ppo(rho, low, high):
        return -min(rho * a, min(max(rho, low), high) * a)

    if name == "none":
        return -a * logp
    if name == "unclipped":
        return -ratio * a
    if name == "symmetric":
        return ppo(ratio, 1 - values["epsilon"], 1 + values["epsilon"])
    if name == "sapo":
        tau = values["tau_pos"] if a > 0 else values["tau_neg"]
        return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * a
    if name == "abc":
        down, up = (values["epsilon_2"], values["epsilon_1"]) if a > 0 else (values["epsilon_4"], values["epsilon_3"])
        return -min(max(ratio, 1 - down), 1 + up) * a
    low, high = values["epsilon_low"], values["epsilon_high"]
    if name == "cispo":
        return -min(max(ratio, 1 - low), 1 + high) * a * logp
    if name == "dcpo":
        q = math.exp(old)
        bottom = 0.5 + 0.5 * math.sqrt(max(1 - 4 * low / q, 0))
        top = min(0.5 + 0.5 * math.sqrt(1 + 4 * high / q), max(values["c"], 10))
        return ppo(ratio, bottom, top) if a >= 0 else min(ppo(ratio, bottom, top), -values["c"] * a)
    if name == "dual" and a < 0:
        return min(ppo(ratio, 1 - low, 1 + high), -values["c"] * a)
    if name == "two_sided":
        return -min(min(ratio, values["delta"]) * a, min(max(ratio, 1 - low), 1 + high) * a)
    return ppo(ratio, 1 - low, 1 + high)


def gmpo(ratios, a, values):
    """One surrogate for a row of ratios: the root of the product of each ratio or its bound, whichever is worse."""
    product = 1.0
    for rho in ratios:
        inside = min(max(rho, math.exp(-values["epsilon_low"])), math.exp(values["epsilon_high"]))
        product *= min(rho, inside) if a > 0 else max(rho, inside)
    return -a * product ** (1 / len(ratios))


def kl(name, logp, ref, old):
    d = ref - logp
    k3 = math.exp(d) - d - 1
    values = {
        "none": 0.0, "k1": -d, "k2": d * d / 2, "k3": k3, "abs": abs(d), "k3_plus": k3, "adaptive": k3,
        "k3_corrected": math.exp(logp - old) * k3, "k1_reward": 0.0,
    }  # fmt: skip
    return values[name]


def loss(rows, w, *, clip, values, ratio, kl_name, beta):
    """rows: lists of (logp, old, a, ref) per token; w: weight per row."""
    total = 0.0
    for row, weight in zip(rows, w, strict=True):
        log_ratios = [logp - old for logp, old, _, _ in row]
        if row and ratio in ("sequence", "sequence_token"):
            log_ratios = [sum(log_ratios) / len(row)] * len(row)
        if row and ratio == "sequence_arithmetic":
            log_ratios = [math.log(sum(math.exp(x) for x in log_ratios) / len(row))] * len(row)
        ratios = [math.exp(max(-20.0, min(20.0, x))) for x in log_ratios]
        for (logp, old, a, ref), rho in zip(row, ratios, strict=True):
            here = gmpo(ratios, a, values) if clip == "gmpo" else surrogate(clip, rho, a, logp, old, values)
            total += weight * (here + beta * kl(kl_name, logp, ref, old))
    return total
