r"""reward=math on the references of real data sets: each scores 1 against itself in the usual written forms, and 0
against other numbers. On a sample here, on all of them in the heavy test."""

import json
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

from grpo_lightning.reward import RewardBatch
from grpo_lightning.reward.math import Math

SHARED = Path(__file__).parents[3] / "shared" / "data"
pytestmark = pytest.mark.skipif(not SHARED.exists(), reason="the shared data sets are not here")

SETS: dict[str, Callable[[dict], object]] = {
    "gsm8k/test": lambda row: row["answer"],
    "gsm8k/train": lambda row: row["answer"],
    "svamp/test": lambda row: row["Answer"],
    "aime24/test": lambda row: row["answer"],
}


def references(name: str, every: int = 1) -> list[object]:
    lines = (SHARED / f"{name}.jsonl").read_text().splitlines()[::every]
    return [SETS[name](json.loads(line)) for line in lines]


def value(reference: object) -> Decimal:
    return Decimal(re.sub(r".*####", "", str(reference), flags=re.DOTALL).strip().replace(",", ""))


def plain(number: Decimal) -> str:
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def fraction(number: Decimal) -> str:
    exact = Fraction(number)
    top, bottom = (exact.numerator, exact.denominator) if exact.denominator > 1 else (2 * exact.numerator, 2)
    return ("-" if top < 0 else "") + rf"\frac{{{abs(top)}}}{{{bottom}}}"


def forms(number: Decimal) -> Iterator[str]:
    n = plain(number)
    commas = f"{Decimal(n):,}"
    sign, size = ("-", n[1:]) if n.startswith("-") else ("", n)
    yield n
    yield rf"\boxed{{{n}}}"
    yield f"3 + 4 = 7, and so on.\n#### {n}"
    yield f"The answer is {n}."
    yield f"So they have ${n}$ in the end."
    yield rf"\boxed{{{commas}}}"
    yield f"#### {commas}"
    yield f"The answer is {commas}."
    yield rf"$\boxed{{{commas.replace(',', '{,}')}}}$"
    yield f"The answer is {sign}${size}."
    yield rf"\boxed{{{sign}\${size}}}"
    yield f"The answer is {commas} dollars."
    yield rf"\boxed{{{n}\text{{ apples}}}}"
    yield f"#### {n} km/h"
    yield f"The final answer is {n} euros."
    yield f"The answer is {n if '.' in n else n + '.0'}."
    yield rf"\boxed{{{n if '.' in n else n + '.00'}}}"
    yield rf"\boxed{{{fraction(number)}}}"
    yield f"${fraction(number)}$"
    yield rf"\boxed{{x = {n}}}"
    yield f"**Answer:** {n}"
    yield f"<think>first 1, then 2</think>\\({n}\\)"
    yield rf"First \boxed{{{plain(number + 5)}}}, no: \boxed{{{n}}}"


def others(number: Decimal) -> list[Decimal]:
    """Numbers that are not this one: one more, ten times it, its negative, two digits exchanged."""
    digits = plain(abs(number))
    swapped = [
        Decimal(digits[:i] + digits[i + 1] + digits[i] + digits[i + 2 :]) * (-1 if number < 0 else 1)
        for i in range(len(digits) - 1)
        if digits[i : i + 2].isdigit() and digits[i] != digits[i + 1]
    ]
    return [other for other in (number + 1, number * 10, -number, *swapped[:1]) if other != number]


def wrong_scores(rows: list[tuple[object, str, float]], workers: int = 2) -> list[str]:
    """(reference, completion, score) for each row that did not get its score."""
    checker = Math(timeout=5.0, workers=workers)
    try:
        golds, completions, expected = zip(*rows, strict=True)
        scores = checker(RewardBatch(["q"] * len(rows), list(completions), list(golds)))
    finally:
        checker.close()
    return [
        f"{gold!r:.60} {completion!r} {score} instead of {right}"
        for gold, completion, score, right in zip(golds, completions, scores, expected, strict=True)
        if score != right
    ]


def rows_of(references: list[object]) -> list[tuple[object, str, float]]:
    right = [(gold, form, 1.0) for gold in references for form in forms(value(gold))]
    # each wrong number in two of the forms, all forms in turn
    wrong, at = [], 0
    for gold in references:
        for other in others(value(gold)):
            written = list(forms(other))
            wrong += [(gold, written[(at + k) % len(written)], 0.0) for k in (0, 7)]
            at += 1
    return right + wrong


@pytest.mark.parametrize(("name", "every"), [("gsm8k/test", 60), ("svamp/test", 50), ("aime24/test", 2)])
def test_a_sample(name, every):
    assert wrong_scores(rows_of(references(name, every))) == []


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "every"), [("gsm8k/test", 1), ("gsm8k/train", 5), ("svamp/test", 1), ("aime24/test", 1)]
)
def test_all(name, every):
    assert wrong_scores(rows_of(references(name, every))) == []
