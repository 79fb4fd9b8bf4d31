"""The process behind `reward=math`, run as a script: one JSON object per line in, two lines out for each.

In: {"gold": text, "answer": text}. Out: whether the gold parses, then whether the answer is equal to it, as `true` or
`false`; the second line is missing where the first is `false`. The parent watches the clock: math-verify's own
time-outs need the main thread of the training process, and sympy cannot be interrupted from outside in any other way.
"""

import json
import resource
import signal
import sys
from typing import Any

MEMORY = 4 * 2**30  # bytes; what a model writes (9**9**9) must not take the machine down


def say(value: bool) -> None:
    print(json.dumps(value), flush=True)


def parsed(text: str) -> list[Any]:
    """The expressions in the text; LaTeX needs its dollar signs to be read as such."""
    from math_verify import parse

    try:
        found = parse(text if "$" in text or "\\boxed" in text or "\n" in text else f"${text}$", parsing_timeout=None)
    except Exception:
        return []
    return found if any(not isinstance(expression, str) for expression in found) else []


def equal(gold: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify

    try:
        return bool(answer) and bool(verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None))
    except Exception:
        return False


def main() -> None:
    import math_verify  # noqa: F401  # the slow part of starting

    seconds = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        signal.alarm(seconds)  # ends this process if the parent is gone and cannot
        gold = parsed(job["gold"])
        say(bool(gold))
        if gold:
            signal.alarm(seconds)
            say(equal(gold, parsed(job["answer"])))
        signal.alarm(0)


if __name__ == "__main__":
    main()
