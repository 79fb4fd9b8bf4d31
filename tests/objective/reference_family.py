"""The advantages of the family once more, in plain Python loops straight from the papers: what the tensors must equal.

Each takes a Rollout and its rewards (None: none) and returns a list of numbers per row, one for each token.
"""

import math
from collections import defaultdict

EPS = 1e-6


def moments(values, unbiased=True):
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / max(len(values) - int(unbiased), 1))


def standard(value, values):
    if max(values) == min(values):
        return 0.0
    mean, std = moments(values)
    return (value - mean) / (std + EPS)


def groups(rollout, rewards):
    """id -> the rows of it that have a reward."""
    rows = defaultdict(list)
    for i, g in enumerate(rollout.ids):
        if rewards[i] is not None:
            rows[g].append(i)
    return rows


def spread(rewards, rows):
    return len({rewards[i] for i in rows}) > 1


def by_row(function):
    """From a function that gives {row: A} to lists per token, 0 for the rows it leaves out."""

    def rows(rollout, rewards, **values):
        a = function(rollout, rewards, **values)
        return [[a.get(i, 0.0)] * n for i, n in enumerate(rollout.lengths)]

    return rows


@by_row
def opo(rollout, rewards):
    a = {}
    for rows in groups(rollout, rewards).values():
        tokens = sum(rollout.lengths[i] for i in rows)
        baseline = sum(rollout.lengths[i] * rewards[i] for i in rows) / tokens
        a.update({i: rewards[i] - baseline for i in rows if spread(rewards, rows)})
    return a


@by_row
def gpg(rollout, rewards):
    all_groups = groups(rollout, rewards).values()
    valid = sum(len(rows) for rows in all_groups if spread(rewards, rows))
    a = {}
    for rows in all_groups:
        if spread(rewards, rows):
            mean = sum(rewards[i] for i in rows) / len(rows)
            a.update({i: sum(len(r) for r in all_groups) / valid * (rewards[i] - mean) for i in rows})
    return a


@by_row
def maxrl(rollout, rewards):
    a = {}
    for rows in groups(rollout, rewards).values():
        mean = sum(rewards[i] for i in rows) / len(rows)
        a.update({i: rewards[i] / mean - 1 for i in rows if spread(rewards, rows)})
    return a


@by_row
def pass_at_k(rollout, rewards):
    a = {}
    for rows in groups(rollout, rewards).values():
        if len(rows) > 1:
            a.update(
                {i: max(rewards[j] for j in rows) - max(rewards[j] for j in rows if j != i) for i in rows},
            )
    return a


@by_row
def raft(rollout, rewards):
    return {i: 1.0 for i, r in enumerate(rewards) if r is not None and rollout.correct[i]}


@by_row
def gdpo(rollout, rewards):
    sums, informative = {}, set()
    for rows in groups(rollout, rewards).values():
        for i in rows:
            sums[i] = 0.0
            for name, scores in rollout.components.items():
                there = [scores[j] for j in rows if scores[j] is not None]
                if len(set(there)) > 1:
                    informative.add(rollout.ids[i])
                    if scores[i] is not None:
                        sums[i] += rollout.weights[name] * standard(scores[i], there)
    return {i: standard(s, list(sums.values())) for i, s in sums.items() if rollout.ids[i] in informative}


@by_row
def reinforce_pp_baseline(rollout, rewards):
    centred, dull = {}, set()
    for rows in groups(rollout, rewards).values():
        mean = sum(rewards[i] for i in rows) / len(rows)
        centred.update({i: rewards[i] - mean if spread(rewards, rows) else 0.0 for i in rows})
        dull.update(rows if not spread(rewards, rows) else [])
    tokens = [c for i, c in centred.items() for _ in range(rollout.lengths[i])]
    return {i: standard(c, tokens) for i, c in centred.items() if i not in dull}


@by_row
def grpo_s(rollout, rewards, beta1=1.0, beta2=0.1):
    a = {}
    for rows in groups(rollout, rewards).values():
        h = {i: max(sum(rollout.entropy[i]) / rollout.lengths[i], 1e-8) for i in rows}
        right, wrong = [i for i in rows if rollout.correct[i]], [i for i in rows if not rollout.correct[i]]
        s = {i: beta1 * rewards[i] + beta2 * h[i] / sum(h[k] for k in right) * len(right) for i in right}
        s |= {i: -beta1 - beta2 / h[i] / sum(1 / h[k] for k in wrong) * len(wrong) for i in wrong}
        a.update({i: standard(s[i], list(s.values())) for i in rows if spread(rewards, rows)})
    return a


def gtpo(rollout, rewards, alpha1=1.0, alpha2=0.1):
    a = [[0.0] * n for n in rollout.lengths]
    for rows in groups(rollout, rewards).values():
        for polarity in (True, False):
            members, s = [i for i in rows if rollout.correct[i] == polarity], {}
            for i in members:
                for t in range(rollout.lengths[i]):
                    longer = [k for k in members if rollout.lengths[k] > t]
                    h = {k: max(rollout.entropy[k][t], 1e-8) for k in longer}
                    if polarity:
                        s[i, t] = alpha1 * rewards[i] + alpha2 * h[i] / sum(h.values()) * len(longer)
                    else:
                        s[i, t] = -alpha1 - alpha2 / h[i] / sum(1 / x for x in h.values()) * len(longer)
            for (i, t), value in s.items():
                # At a spread of rounding errors 0 and a number of size 1 are both right: see the test of equal sets.
                a[i][t] = standard(value, list(s.values())) if spread(rewards, rows) else 0.0
    return a


def process(rollout, rewards):
    a = [[0.0] * n for n in rollout.lengths]
    for rows in groups(rollout, rewards).values():
        scores = [score for i in rows for score, _ in rollout.steps[i] if score is not None]
        for i in rows:
            for t in range(rollout.lengths[i]):
                a[i][t] = sum(standard(s, scores) for s, end in rollout.steps[i] if s is not None and end >= t)
    return a


def gae(rollout, rewards, kl=None, values=None, gamma=1.0, lam=1.0, whiten=True):
    raw = []
    for i, n in enumerate(rollout.lengths):
        if rewards[i] is None:
            raw.append([])
            continue
        v = [*(values[i] if values else [0.0] * n), 0.0]
        r = [(rewards[i] if t == n - 1 else 0.0) - (kl[i][t] if kl else 0.0) for t in range(n)]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(n)]
        raw.append([sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, n)) for t in range(n)])
    flat = [x for row in raw for x in row]
    rows = [[standard(x, flat) if whiten else x for x in row] for row in raw]
    return [row or [0.0] * n for row, n in zip(rows, rollout.lengths, strict=True)]


def dcpo(rollout, rewards, history):
    """history: prompt -> list of (mean, std) of the earlier groups; this rollout's are added at the end."""
    a, new = [[0.0] * n for n in rollout.lengths], []
    for rows in groups(rollout, rewards).values():
        if len(rows) < 2:
            continue
        mean, std = moments([rewards[i] for i in rows]) if spread(rewards, rows) else (rewards[rows[0]], 0.0)
        prompt = rollout.prompts[rows[0]]
        seen = [*history.get(prompt, []), (mean, std)]
        visits, total_mean = len(seen), sum(m for m, _ in seen) / len(seen)
        # The merge in closed form: the mean of the variances and the spread of the means.
        total_std = math.sqrt(sum(s * s + (m - total_mean) ** 2 for m, s in seen) / visits)
        if all(m == mean and s == 0 for m, s in seen):
            total_std = 0.0
        for i in rows:
            z_new = (rewards[i] - mean) / std if std else 0.0
            z_total = (rewards[i] - total_mean) / total_std if total_std else 0.0
            options = (
                ((visits - 1) * z_new + z_total) / visits,
                (z_new + (visits - 1) * z_total) / visits,
            )
            a[i] = [min(options, key=abs)] * rollout.lengths[i]
        new.append((prompt, (mean, std)))
    for prompt, pair in new:
        history.setdefault(prompt, []).append(pair)
    return a
