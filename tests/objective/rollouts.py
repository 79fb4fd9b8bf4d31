"""Random rollouts with everything that an advantage may ask for, as Python lists and as tensors in any layout."""

from dataclasses import dataclass, field

import torch

NAN = float("nan")


@dataclass
class Rollout:
    """rewards: None where there is none; per token: entropy, values, kl; steps: (reward or None, position) per row."""

    rewards: list
    ids: list
    lengths: list
    correct: list
    prompts: list
    entropy: list
    values: list
    kl: list
    steps: list
    components: dict
    weights: dict = field(default_factory=lambda: {"exact": 1.0, "format": 0.3})

    def __len__(self):
        return len(self.rewards)

    def arguments(self, order=None, left=0, right=0, hole=False, ids=lambda g: g):
        """rewards, group_ids, mask [n, T] and every keyword of the rows in `order`.

        Padding, and with `hole` a gap behind each first token, hold garbage. `ids` renames the groups.
        """
        order = range(len(self)) if order is None else order
        width = left + max(self.lengths) + right + int(hole)
        place = [left + t + int(hole and t > 0) for t in range(max(self.lengths))]
        mask = torch.zeros(len(self), width, dtype=torch.bool)
        for k, i in enumerate(order):
            mask[k, place[: self.lengths[i]]] = True

        def per_token(rows, garbage):
            flat = torch.tensor([x for i in order for x in rows[i]], dtype=torch.float64)
            return torch.full(mask.shape, garbage, dtype=torch.float64).masked_scatter(mask, flat)

        def per_row(row):
            return torch.tensor([NAN if row[i] is None else row[i] for i in order], dtype=torch.float64)

        most = max(len(row) for row in self.steps)
        step_rewards, step_ends = torch.full((len(self), most), NAN).double(), torch.full((len(self), most), -1)
        for k, i in enumerate(order):
            for j, (reward, end) in enumerate(self.steps[i]):
                step_rewards[k, j], step_ends[k, j] = NAN if reward is None else reward, place[end]
        keywords = {
            "correct": torch.tensor([self.correct[i] for i in order]),
            "prompt_ids": torch.tensor([self.prompts[i] for i in order]),
            "components": {name: per_row(row) for name, row in self.components.items()},
            "component_weights": self.weights,
            "entropy": per_token(self.entropy, NAN),
            "values": per_token(self.values, NAN),
            "step_rewards": step_rewards,
            "step_ends": step_ends,
        }
        return (per_row(self.rewards), torch.tensor([ids(self.ids[i]) for i in order]), mask), keywords

    def kl_penalty(self, mask):
        flat = torch.tensor([x for row in self.kl for x in row], dtype=torch.float64)
        return torch.full(mask.shape, NAN, dtype=torch.float64).masked_scatter(mask, flat)


def draw(dice, width=6) -> Rollout:
    """Groups of 2 to 6 in random order, two groups now and then of one prompt; some rows without a reward."""
    ids = [g for g in (3, 70, 9) for _ in range(dice.randint(2, 6))]
    dice.shuffle(ids)
    n = len(ids)
    lengths = [dice.randint(1, width) for _ in range(n)]
    prompt_of = {g: dice.choice((5, 8)) for g in (3, 70, 9)}
    equal = dice.choice((3, 70, 9, None))  # this group's rewards are all the same

    def scores(none):
        return [0.3 if g == equal else dice.choice((none, 0.0, 1.0, dice.random())) for g in ids]

    def tokens(low, high):
        return [[dice.uniform(low, high) for _ in range(k)] for k in lengths]

    steps = [
        [(dice.choice((None, 0.0, 1.0)), end) for end in sorted(dice.sample(range(k), dice.randint(0, k)))]
        for k in lengths
    ]
    rewards = scores(None)
    return Rollout(
        rewards=rewards if any(r is not None for r in rewards) else [1.0] * n,
        ids=ids,
        lengths=lengths,
        correct=[dice.random() < 0.5 for _ in ids],
        prompts=[prompt_of[g] for g in ids],
        entropy=[[h if h > 0.1 else 0.0 for h in row] for row in tokens(0, 3)],
        values=tokens(-1, 1),
        kl=tokens(0, 0.2),
        steps=steps,
        components={"exact": scores(None), "format": scores(0.0)},
    )
