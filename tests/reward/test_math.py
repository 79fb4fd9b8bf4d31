r"""reward=math: mathematical equality, references that are none, time-outs, threads."""

import threading
import time

import pytest

from grpo_lightning.errors import RunError, UsageError
from grpo_lightning.reward import RewardBatch
from grpo_lightning.reward import math as reward_math
from grpo_lightning.reward.math import Math

F = r"\frac{63}{400}"


@pytest.fixture(scope="module")
def checker():
    component = Math(timeout=2.0)
    yield component
    component.close()


def score(component: Math, gold: object, completion: str) -> float | None:
    return component(RewardBatch(["q"], [completion], [gold]))[0]


@pytest.mark.parametrize(
    ("gold", "completion"),
    [
        (F, rf"\boxed{{{F}}}"),
        (F, F),
        (F, "63/400"),
        ("x=5", "5"),
        ("5", "x = 5"),
        ("1000", "1,000"),
        ("50%", "0.5"),
        ("0.5", r"\boxed{50\%}"),
        ("18 dollars", r"\boxed{\$18}"),
        ("18 dollars", r"\boxed{9\cdot 2}"),
        ("42", r"\boxed{99}, no, \boxed{42}"),
        (r"\sqrt{8}", r"The answer is \(2\sqrt{2}\)."),
        ("x^2+1", r"\boxed{1+x^2}"),
        ("ab+c", r"\boxed{c+ba}"),
        ("2pi", r"\boxed{2\pi}"),
        ("log(3)", r"\boxed{\log 3}"),
        ("(1,2)", "(1,2)"),
        ("(1,2)", "So it is $(1,2)$ as was to be shown"),
        (r"\{1,2\}", r"\boxed{\{2,1\}}"),
        ("[0,1)", "$[0,1)$"),
        (r"(-\infty, 3]", r"\boxed{(-\infty,3]}"),
        (r"[0,1) \cup (2,3]", r"\boxed{[0,1)\cup(2,3]}"),
        (r"x \in [1,2]", r"\boxed{[1,2]}"),
        (r"\{1,2\}", r"\boxed{1,2}"),
        ("x>3", r"\boxed{x>3}"),
        ("25%", r"\boxed{\frac14}"),
        (r"\frac{1}{2}", r"\boxed{50\%}"),
        ("€5", "The answer is 5 euros."),
        ("£1,200.50", "The answer is £1200.5"),
        ("5 cm^2", r"\boxed{5\ \mathrm{cm}^2}"),
        (r"1\frac{1}{2}", r"\boxed{\frac{3}{2}}"),
        ("1500", r"\boxed{1.5\times 10^{3}}"),
        (r"\pm 2", r"\boxed{\pm 2}"),
        ("3+4i", r"\boxed{4i+3}"),
        (r"\emptyset", r"\boxed{\emptyset}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}"),
        ("7", "The answer is 7 apples because of 3 + 4."),
        ("7", "<think>6</think>7"),
    ],
)
def test_right(checker, gold, completion):
    assert score(checker, gold, completion) == 1.0


@pytest.mark.parametrize(
    ("gold", "completion"),
    [
        (F, r"\frac{64}{400}"),
        ("6", r"\boxed{3}"),
        ("1000", "1,001"),
        ("99", r"\boxed{99}, no, \boxed{42}"),
        ("7", r"\binom{10^8}{5*10^7}"),
        ("7", "that makes 10^7"),
        ("(1,2)", "(2,1)"),
        ("[0,1)", r"\boxed{[0,1]}"),
        (r"(-\infty, 3)", r"\boxed{(-\infty, 3]}"),
        (r"\{1,2,3\}", r"\boxed{\{1,2\}}"),
        ("25%", r"\boxed{26\%}"),
        ("3+4i", r"\boxed{3-4i}"),
        ("x>3", r"\boxed{x<3}"),
        ("72", r"\boxed{72}. Wait, the answer is 71."),
        ("72", "#### 72\n#### 71"),
        ("5", r"\boxed{5x}"),
        ("5", ""),
        ("x^2", "it cannot be known"),
        ("x^2+1", "<think>x^2+1</think>"),
        ("x^2+1", "<think>x^2+1"),
    ],
)
def test_wrong(checker, gold, completion):
    assert score(checker, gold, completion) == 0.0


@pytest.mark.parametrize("gold", ["forty two", "Answer is forty two.", r"\text{yes}", None, ""])
def test_a_reference_that_is_no_mathematics_gives_no_score(checker, gold):
    assert score(checker, gold, gold or "5") is None
    assert score(checker, gold, "42") is None


def test_gold_comes_first(checker, monkeypatch):
    asked = []
    monkeypatch.setattr(reward_math._Worker, "ask", lambda self, *job: asked.append(job) or (1.0, False))
    score(checker, r"\sqrt{8}", r"\boxed{2\sqrt{2}}")
    assert asked == [(r"\sqrt{8}", r"2\sqrt{2}", 2.0)]


def test_a_time_out_is_wrong_and_costs_no_other_row(checker, caplog):
    start = time.perf_counter()
    endless = r"\boxed{9^{9^{9^9}}}"
    batch = RewardBatch(["q"] * 3, [r"\boxed{2^2}", endless, r"\boxed{3^2}"], [r"4", r"\sqrt{2}", "9"])
    assert checker(batch) == [1.0, 0.0, 1.0]
    assert time.perf_counter() - start < 20  # the time-out of 2 s and the start of another worker
    assert "no verdict within 2.0 s" in caplog.text


HOSTILE = [
    r"2^{2^{2^{2^{2^{2}}}}}", "(" * 5000, "1000000!", "(x+y+z)^{5000}", r"\prod_{n=1}^{10^9} n", r"\frac{" * 3000,
    r"\sqrt{" * 2000 + "2" + "}" * 2000, "1+" * 20000 + "1", "9" * 100000, "\x00\x01", "$" * 10000,
]  # fmt: skip


@pytest.mark.parametrize(
    "hostile", [*HOSTILE[:2], *(pytest.param(text, marks=pytest.mark.heavy) for text in HOSTILE[2:])]
)
def test_hostile_expressions_are_wrong_and_as_references_hang_nothing(hostile):
    checker = Math(timeout=0.5, workers=2)
    try:
        checker(RewardBatch(["q"] * 2, ["2"] * 2, [r"\sqrt{8}"] * 2))  # starts the workers
        start = time.perf_counter()
        golds = [r"\sqrt{2}", r"\sqrt{2}", "7", hostile]
        assert checker(RewardBatch(["q"] * 4, [hostile, rf"\boxed{{{hostile}}}", hostile, "5"], golds))[:3] == [0.0] * 3
        assert time.perf_counter() - start < 30  # four time-outs, and the start of other workers
        assert checker(RewardBatch(["q"], [r"\boxed{2\sqrt{2}}"], [r"\sqrt{8}"])) == [1.0]
    finally:
        checker.close()


def test_a_reference_that_takes_too_long_gives_no_score(checker, monkeypatch):
    assert score(checker, r"\sqrt{8}", r"\boxed{2\sqrt{2}}") == 1.0
    with monkeypatch.context() as patch:
        patch.setattr(reward_math._Worker, "_line", lambda self, timeout: None)  # not even the gold's line comes
        assert score(checker, r"\sqrt{8}", r"\boxed{2\sqrt{2}}") is None
    assert score(checker, r"\sqrt{8}", r"\boxed{2\sqrt{2}}") == 1.0  # from another worker


def test_a_worker_that_died_is_replaced(checker):
    assert score(checker, r"\sqrt{8}", r"\boxed{2\sqrt{2}}") == 1.0
    worker = checker._idle.get()
    worker._process.kill()
    worker._process.wait()
    checker._idle.put(worker)
    assert score(checker, r"\sqrt{8}", r"\boxed{2\sqrt{2}}") == 1.0


def test_from_other_threads(checker):
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(score(checker, r"\sqrt{8}", r"\boxed{2\sqrt{2}}")))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [1.0] * 3


def test_several_workers_keep_the_order_and_close_ends_them():
    component = Math(workers=2)
    completions = [rf"\boxed{{\sqrt{{{i}}}}}" for i in range(2, 14)]
    scores = component(RewardBatch(["q"] * 12, completions, [r"\sqrt{7}"] * 12))
    assert scores == [float(i == 7) for i in range(2, 14)]
    workers = [component._idle.get() for _ in range(2)]
    for worker in workers:
        component._idle.put(worker)
    component.close()
    assert all(worker._process.poll() is not None for worker in workers if worker)


def test_a_worker_that_cannot_start_says_how_to_see_why(monkeypatch):
    monkeypatch.setattr(reward_math.sys, "executable", "/bin/false")
    with pytest.raises(RunError, match=r"reward\.math: the worker process did not start"):
        score(Math(), r"\sqrt{8}", r"\sqrt{8}")


@pytest.mark.parametrize("options", [{"timeout": 0}, {"timeout": "5"}, {"workers": 0}, {"workers": 1.5}])
def test_options(options):
    with pytest.raises(UsageError, match=rf"reward\.math\.{next(iter(options))}"):
        Math(**options)


def test_math_verify_missing(monkeypatch):
    monkeypatch.setattr(reward_math.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install math-verify"):
        Math()


@pytest.mark.parametrize(
    ("gold", "completion", "expected"),
    [
        (r"(3,\infty)", r"\boxed{x>3}", 1.0),
        (r"(-\infty,3]", r"\boxed{x \le 3}", 1.0),
        (r"(3,\infty)", r"\boxed{x>4}", 0.0),
        (r"(3,\infty)", r"\boxed{x \ge 3}", 0.0),
    ],
)
def test_an_inequality_is_the_interval_that_it_describes(checker, gold, completion, expected):
    assert score(checker, gold, completion) == expected
