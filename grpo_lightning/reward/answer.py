"""Reads the final answer out of a completion. Pure regular expressions, no evaluation of what a model wrote."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

_UNSIGNED = (
    r"(?:(?:[0-9]+\ )?[0-9]+/[0-9]+(?![0-9/])"  # 3/4, 1 3/4
    r"|(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"  # 1,234.5  2e3
    r"|(?<![0-9.])\.[0-9]+)"  # .5
)
# A minus is a sign only where it cannot be a subtraction or a hyphen: not after a word, a digit or a closing bracket.
NUMBER = rf"(?:(?<![\w)\]}}.])-)?(?<![A-Za-z0-9_]){_UNSIGNED}(?:\ ?%|\ percent\b)?"
_NUMBER = re.compile(NUMBER)
_OPERAND = rf"{NUMBER}(?:\ ?[A-Za-z]+)?"
# "x = " or "3 apples + 4 apples = " in front of a result
_LEFT_SIDE = re.compile(rf"(?:[A-Za-z]+|{_OPERAND}(?:\ ?[-+*/×÷]\ ?{_OPERAND})+)\ ?=\ ?")
_UNIT = re.compile(
    r"(?!\ ?(?:[abcijknpqrtuvwxyz]|pi|sqrt)\b)[^0-9\\+*=,]*(?:(?<=[a-z])\^?[23][^0-9\\+*=,]*)?"
)  # dollars, km/h, m^2; no variable

_MARK = re.compile(
    r"(?P<boxed>\\(?:boxed|fbox)\s*\{)|(?P<tag><answer>)|(?P<hash>\#{4}(?!\#))"
    r"|(?P<phrase>\banswer\b\**(?:\s+is\b|\s*[:=])\s*[:=]?)",
    re.IGNORECASE,
)
_FACTOR = re.compile(r"\ ?(?:\^|π|\\(?:sqrt|pi)\b)")  # behind a number: it goes on
_LINE = re.compile(r"\s*([^\n]*)")


@dataclass(frozen=True)
class Number:
    """A number as it was written: its value, whether it carried a percent sign, whether it was a fraction."""

    value: Fraction
    percent: bool
    fraction: bool


@dataclass(frozen=True)
class Marked:
    """The text behind a mark. kind: "boxed", "tag" (<answer>), "hash" (####) or "phrase" ("the answer is")."""

    kind: str
    text: str


def spoken(prompt: str, completion: str) -> str:
    """The completion with the `<think>` that some chat templates put at the end of the prompt."""
    return f"<think>{completion}" if prompt.rstrip().endswith("<think>") else completion


def visible(prompt: str, completion: str) -> str | None:
    """The part of a completion that answers: after the last `</think>`. None if thinking was begun and never ended."""
    text = spoken(prompt, completion)
    _, end, after = text.rpartition("</think>")
    return after if end or "<think>" not in text else None


def marked_answers(text: str) -> Iterator[Marked]:
    r"""The marked answers from the last to the first, marks within a mark before it.

    Marks: `\boxed{...}`, `<answer>...</answer>`, `#### ...`, "the answer is ...", "answer: ...".
    The text behind `####` and a phrase reaches to the end of its line.
    """
    marks = list(_MARK.finditer(text))
    closing = _closing_braces(text) if any(mark["boxed"] for mark in marks) else {}
    for mark in reversed(marks):
        start = mark.end()
        if mark["boxed"]:
            end = closing.get(start - 1, -1)
        elif mark["tag"]:
            end = text.find("</answer>", start)
        else:
            start, end = _LINE.match(text, start).span(1)  # type: ignore[union-attr]  # it matches anything
        if end >= 0:
            yield Marked(str(mark.lastgroup), text[start:end].strip())


def _closing_braces(text: str) -> dict[int, int]:
    """Position of each opening brace that is closed -> position of the brace that closes it."""
    closing, opened = {}, []
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closing[opened.pop()] = match.start()
    return closing


def plain(text: str) -> str:
    """Text with LaTeX and Markdown dress, currency signs and repeated blanks taken off."""
    text = re.sub(r"[^\S\n]+", " ", text)
    text = re.sub(r"(?<=[0-9])\ ?(?=\\[dt]?frac)", " ", text)  # a mixed number
    text = re.sub(r"\\[dt]?frac\ ?\{\ ?(-?)\ ?([0-9]+)\ ?\}\ ?\{\ ?([0-9]+)\ ?\}", r"\1\2/\3", text)
    text = re.sub(r"\\[dt]?frac\ ?([0-9])\ ?([0-9])", r"\1/\2", text)
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf|mbox)\ ?\{([^{}]*)\}", r" \1 ", text)
    text = text.replace("−", "-").replace("{,}", ",").replace("\\%", "%").replace("**", " ")
    text = re.sub(r"\\[!,;:]", "", text)
    text = re.sub(r"\ ?\^\ ?\{?\ ?\\circ\ ?\}?|°|\\(?:left|right)\b", "", text)
    text = re.sub(r"(-?)\ ?\\?[$£€](?=\.?[0-9])", r" \1", text)
    text = re.sub(r"\\?[$£€]|\\[()\[\]]|~", " ", text)
    text = re.sub(r"=\ ?-\ +(?=[0-9.])", "= -", text)
    return re.sub(r"\ +", " ", text).strip()


def parse_number(written: str) -> Number | None:
    """The number matched by NUMBER; None if it has no value (x/0) or is longer than any answer."""
    percent = written.endswith(("%", "percent"))
    digits = written.removesuffix("percent").rstrip("% ").replace(",", "")
    if len(digits) > 1000:  # int() of much longer digit strings is refused by Python
        return None
    try:
        if "/" not in digits:
            return Number(Fraction(digits), percent, fraction=False)
        sign, digits = (-1, digits[1:]) if digits.startswith("-") else (1, digits)
        whole, _, part = digits.rpartition(" ")
        return Number(sign * (Fraction(whole or 0) + Fraction(part)), percent, fraction=True)
    except (ValueError, ZeroDivisionError):
        return None


def whole_number(text: str) -> Number | None:
    """The number that the text consists of, left sides ("x =") and a unit aside; None if it is anything else."""
    text = _right_side(plain(text)).strip(" .")
    match = _NUMBER.match(text)
    if match is None or not _UNIT.fullmatch(text, match.end()):
        return None
    return parse_number(match[0])


def first_number(text: str, within: int) -> Number | None:
    """The first number of a line if it starts at most `within` characters into it, left sides ("3 + 4 =") aside."""
    text = _right_side(plain(text))
    match = _NUMBER.search(text)
    return parse_number(match[0]) if match and match.start() <= within else None


def last_number(text: str) -> Number | None:
    """The last number anywhere in the text, a unit's exponent (m^2) aside; None if it is only a part of one.

    10^7, \\sqrt{7} and 7\\pi are not 7.
    """
    text = plain(text)
    for match in reversed(list(_NUMBER.finditer(text))):
        before = text[max(0, match.start() - 20) : match.start()]
        if not re.search(r"[A-Za-z]\ ?\^\ ?\{?$", before):
            part = re.search(r"(?:[\^_]|\\(?:sqrt(?:\[\w*\]?)?|log|ln|sin|cos|tan|binom))\ ?\{?$", before)
            return None if part or _FACTOR.match(text, match.end()) else parse_number(match[0])
    return None


def _right_side(text: str) -> str:
    while match := _LEFT_SIDE.match(text):
        text = text[match.end() :]
    return text
