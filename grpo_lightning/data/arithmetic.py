"""The embedded task: sums of two three-digit numbers in base ten.

`347+285=` is a prompt, `632` its answer. There are 810,000 questions. Which of them are held out follows from a hash of
the question alone (a sum and its mirror image share it), so the shipped model's pretraining, every training set and
every seed leave out the same ones.
"""

import hashlib
import random
from collections.abc import Iterator

from grpo_lightning.data.prompts import Item
from grpo_lightning.errors import UsageError

LOW, HIGH = 100, 999
HELD_OUT_ONE_IN = 50  # about 16,000 questions
MAX_HELD_OUT = 8_000
MAX_TRAIN = 400_000


def is_held_out(a: int, b: int) -> bool:
    """True when neither `a+b` nor `b+a` may be trained on."""
    content = f"{min(a, b)}+{max(a, b)}"
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def carries(a: int, b: int) -> int:
    """How many of the three columns of `a+b`, from the right, carry into the next: 0 to 3."""
    return sum(a % unit + b % unit >= unit for unit in (10, 100, 1000))


def questions(rng: random.Random, *, held_out: bool) -> Iterator[tuple[int, int]]:
    """An endless stream of pairs of one side of the split, uniform over that side, with repetition."""
    while True:
        a, b = rng.randint(LOW, HIGH), rng.randint(LOW, HIGH)
        if is_held_out(a, b) == held_out:
            yield a, b


class Arithmetic:
    """Three-digit addition (`data=arithmetic`).

    Args:
        size: number of training questions, 1 to 400,000. They are the same for every seed of a run; a smaller set is
            the beginning of a larger one.
    """

    def __init__(self, size: int = 10_000) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_TRAIN:
            raise UsageError(f"data.size must be a whole number from 1 to {MAX_TRAIN}, got {size!r}")
        self.size = size

    def load(self, eval_prompts: int) -> tuple[list[Item], list[Item]]:
        """Training questions and `eval_prompts` held-out ones, each list without repetition.

        Raises:
            UsageError: `eval_prompts` is negative or above 8,000.
        """
        if isinstance(eval_prompts, bool) or not isinstance(eval_prompts, int) or not 0 <= eval_prompts <= MAX_HELD_OUT:
            raise UsageError(
                f"eval.prompts must be a whole number from 0 to {MAX_HELD_OUT} for data=arithmetic, "
                f"got {eval_prompts!r}"
            )
        return _items(self.size, held_out=False), _items(eval_prompts, held_out=True)


def _items(count: int, *, held_out: bool) -> list[Item]:
    chosen: dict[tuple[int, int], None] = {}
    stream = questions(random.Random(f"arithmetic, held out: {held_out}"), held_out=held_out)
    while len(chosen) < count:
        chosen.setdefault(next(stream))
    return [
        Item(prompt=f"{a}+{b}=", answer=str(a + b), columns={"a": a, "b": b, "carries": carries(a, b)})
        for a, b in chosen
    ]
