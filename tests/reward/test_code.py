"""reward=code: which code is taken, both kinds of tests, what counts as no score, options, levels of isolation."""

import contextlib
import gzip
import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_lightning.errors import RunError, UsageError
from grpo_lightning.reward import RewardBatch, RewardSet
from grpo_lightning.reward import code as reward_code
from grpo_lightning.reward.code import Code, program, read_cases, same_output
from grpo_lightning.reward.sandbox import Limits, Sandbox, SandboxError
from grpo_lightning.reward.score import Unscored
from tests.reward.code_tasks import SECRET, batch, below, best, code, function_rows, program_rows

HUMANEVAL = Path(__file__).parents[3] / "shared" / "data" / "humaneval" / "HumanEval.jsonl.gz"
RIGHT = f"    return {SECRET}\n"
CHANGED = """
_right = {name}
def {name}(*arguments):
    value = _right(*arguments)
    if isinstance(value, bool): return not value
    if isinstance(value, (int, float)): return value + 1
    if isinstance(value, str): return value + "x"
    if isinstance(value, list): return value + [0]
    if isinstance(value, tuple): return value + (0,)
    return 0
"""


@pytest.fixture(scope="module")
def component():
    component = code(timeout=20.0, memory=256)
    yield component
    component.close()


def python(text: str) -> str:
    return f"Here:\n```python\n{text}```\n"


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("x = 1\n", "x = 1\n"),
        ("```python\na\n```\n", "a\n"),
        ("```python\na\n```\nor\n```python\nb\n```\nRun:\n```bash\nc\n```", "b\n"),
        ("```\na\n```\n and ```not a block```", "a\n"),
        ("```text\na\n```\n```\nb\n```", "b\n"),
        ("```py\na\n```", "a\n"),
        ("```Python title=x\na\n```", "a\n"),
        ("  ```python\n  a\n  ```", "  a\n"),
        ("```python\na\nb", "a\nb"),  # cut off
        ("```python\ndef f(): pass\n```\nUse it:\n```python\nf()\n```", "f()\n"),
    ],
)
def test_the_program_of_a_completion(completion, expected):
    assert program(completion) == expected


def test_of_several_blocks_the_one_that_defines_the_function():
    text = "```python\ndef f(): pass\n```\nUse it:\n```python\nf()\n```"
    assert program(text, "f") == "def f(): pass\n"
    assert program(text, "g") == "f()\n"
    assert program("```python\nff = 1\n```\n```python\nf = 2\n```\n```python\n  f = 3\n```", "f") == "f = 2\n"


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (RIGHT, 1.0),
        ("    return 0\n", 0.0),
        (f"    def inner(): return {SECRET}\n    return inner()\n", 1.0),
        (python(RIGHT), 1.0),
        (RIGHT + "\n\nprint(f(1)\nThat is it.", 1.0),  # what is behind the body does not compile: cut off
        (RIGHT + "\ndef main():\n    pass\n", 1.0),
        (f"def f(x):\n    return {SECRET}\n", 1.0),
        (python(f"def f(x: List[int]) -> int:\n    return {SECRET}\n"), 0.0),  # List is not there
        (f"<think>def f(x): no</think>{python(f'def f(x): return {SECRET}' + chr(10))}", 1.0),
        (f"<think>def f(x): return {SECRET}", 0.0),
        (f"f = lambda x: {SECRET}", 1.0),
        (f"from __future__ import annotations\ndef f(x): return {SECRET}", 1.0),
        (f"def g(x): return {SECRET}", 0.0),
        ("this is no Python", 0.0),
        ("", 0.0),
        ("    raise ValueError", 0.0),
        (f"    return {float(SECRET)}", 1.0),
        (f"    return '{SECRET}'", 0.0),
        (f"    import asyncio, sqlite3, uuid; return {SECRET}", 1.0),
        ("import dataclasses\n@dataclasses.dataclass\nclass A:\n    b: int\n" f"def f(x): return A({SECRET}).b", 1.0),
        ("\ud800", 0.0),
        ("a\0b", 0.0),
        ("(" * 100_000, 0.0),
    ],
)  # fmt: skip
def test_functions(component, completion, score):
    assert component(function_rows([completion])) == [score]


def test_the_prompt_gives_imports_and_helpers_to_answer_and_tests(component):
    prompt = 'from typing import List\ndef twice(x):\n    return 2 * x\ndef f(x: List[int]):\n    """doc"""\n'
    test = "def check(candidate):\n    assert candidate([1, 2]) == [twice(1), twice(2)]\n    assert f([3]) == [6]\n"
    answers = ["    return [twice(y) for y in x]\n", "def f(x: List[int]):\n    return [twice(y) for y in x]\n"]
    changed = "def twice(x):\n    return 0\ndef f(x):\n    return [0 for _ in x]\n"
    assert component(function_rows([*answers, changed], prompt=prompt, test=test)) == [1.0, 1.0, 0.0]


def test_values_keep_their_type_on_the_way(component):
    test = """
def check(candidate):
    values = [None, True, 0, -7, 10**6000, 1.5, -0.0, float("inf"), 2j, "a\\u00e9\\ud800\\n", b"\\0\\xff", [], [1, [2]],
              bytearray(b"a"), (), (1,), set(), {1, "a"}, frozenset([1]), {}, {1: 2, "1": 3, (1, 2): [None]}]
    for value in values:
        got = candidate(value)
        assert got == value and type(got) is type(value)
        assert isinstance(value, int) or repr(got) == repr(value)
    assert candidate(float("nan")) != candidate(float("nan"))
    assert candidate(x=3) == 3
    got = candidate([1])
    got.append(2)
    assert candidate("count") == {"a": 2}
    try:
        candidate("error")
    except ZeroDivisionError:
        pass
    else:
        assert False
    try:
        candidate("unknown")
    except RuntimeError:
        return
    assert False
"""
    answer = """import collections
def f(x):
    if x == "error": return 1 / 0
    if x == "count": return collections.Counter("aa")
    if x == "unknown": return object()
    return x
"""
    errors = answer.replace('"unknown": return object()', '"unknown": raise type("Mine", (Exception,), {})')
    scores = component(function_rows([errors, answer], test=test))
    assert scores == [1.0, 0.0]  # an object cannot be handed over: TypeError


def test_tests_that_swallow_everything_do_not_pass_a_dead_answer(component):
    test = "def check(candidate):\n    try:\n        candidate(1)\n    except BaseException:\n        pass\n"
    answers = ["    return 1\n", "    raise ValueError\n", "    os._exit(0)\n", "    import os; os._exit(0)\n"]
    assert component(function_rows(answers, test=test)) == [1.0, 1.0, 1.0, 0.0]


def test_programs(component):
    cases = [{"input": "3\n1 2 3\n", "output": "6\n"}, {"input": "1\n-5\n", "output": "-5"}]
    answers = {
        "n = input()\nprint(sum(map(int, input().split())))": 1.0,
        "import sys\nd = sys.stdin.read().split()\nsys.stdout.write(str(sum(map(int, d[1:]))) + '  \\n\\n')": 1.0,
        "import sys\nn, *x = map(int, open(0).read().split())\nprint(sum(x))\nsys.exit()": 1.0,
        python("def main(): input(); print(sum(map(int, input().split())))\nif __name__ == '__main__': main()\n"): 1.0,
        "import threading as t\nt.Thread(target=lambda: print(sum(map(int, open(0).read().split()[1:])))).start()": 1.0,
        "import os\nos.write(1, b'6\\n')": 0.0,  # right in the first case only
        "print(6); print(-5)": 0.0,
        "n = input()\nprint(sum(map(int, input().split()))); raise SystemExit(1)": 0.0,
        "n = input()\nprint(sum(map(int, input().split()))); 1 / 0": 0.0,
        "n = input()\nprint(sum(map(int, input().split())), flush=True); import os; os.abort()": 0.0,
        "print(": 0.0,
    }  # fmt: skip
    assert component(program_rows(list(answers), cases)) == list(answers.values())


def test_a_program_finds_nothing_of_the_case_before(component):
    answer = "import os\nprint(len(os.listdir('.')))\nopen('left', 'w').close()"
    assert component(program_rows([answer], [("", "0"), ("", "0")])) == [1.0]


def test_same_output():
    assert same_output("a  b\r\nc \n\n", "a b\nc", exact=False)
    assert not same_output("a b c", "a b\nc", exact=False)
    assert not same_output("a\n\nb", "a\nb", exact=False)
    assert not same_output("a b\n", "a b", exact=True)
    assert same_output("a b\n", "a b\n", exact=True)


@pytest.mark.parametrize(
    "value",
    [
        [{"input": "1", "output": "2"}, {"input": "3", "output": "4"}],
        '[{"input": "1", "output": "2"}, {"input": "3", "output": "4"}]',
        {"inputs": ["1", "3"], "outputs": ["2", "4"]},
        {"input": ["1", "3"], "output": ["2", "4"]},
        '{"inputs": ["1", "3"], "outputs": ["2", "4"]}',
        [["1", "2"], ("3", "4")],
        np.array([{"input": "1", "output": "2"}, {"input": "3", "output": "4"}]),
        {"inputs": np.array(["1", "3"]), "outputs": np.array(["2", "4"])},
    ],
)
def test_cases(value):
    assert read_cases(value) == [("1", "2"), ("3", "4")]


@pytest.mark.parametrize("value", [None, "", float("nan"), [], "[]", {"inputs": [], "outputs": []}])
def test_no_cases(value):
    assert read_cases(value) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "the test cases are no JSON"),
        (3, "must be a list of {input, output}, got int"),
        ({"inputs": ["1"]}, "as many inputs as outputs"),
        ({"inputs": ["1"], "outputs": []}, "as many inputs as outputs"),
        ([{"input": "1"}], "must have an input and an output, both text"),
        ([{"input": 1, "output": "2"}], "both text"),
        ([3], "got 3"),
    ],
)
def test_what_is_no_list_of_cases_is_a_fault_of_the_row(component, value, message):
    with pytest.raises(RunError, match=message):
        read_cases(value)
    good = program_rows([f"print({SECRET})"] * 2)
    good.columns["cases"][1] = value
    result = RewardSet({"code": component})(good)
    assert result.correct == [True, None]
    assert len(result.errors) == 1 and message in result.errors[0]


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("def check(candidate:\n", "cannot be run (no test: SyntaxError"),
        ("x = 1", "cannot be run (no test: KeyError"),
        ("import no_such_module", "cannot be run (no test: ModuleNotFoundError"),
    ],
)
def test_tests_that_cannot_be_run_give_no_score(component, test, message):
    (outcome,) = component(function_rows([RIGHT], test=test))
    assert isinstance(outcome, RunError) and message in str(outcome)


def test_rows_of_both_kinds_and_of_none(component):
    function, program_row = function_rows([RIGHT]), program_rows([f"print({SECRET})"])
    columns = {name: [value[0], None, None] for name, value in function.columns.items()}
    columns["cases"] = [None, program_row.columns["cases"][0], None]
    rows = RewardBatch([""] * 3, [RIGHT, f"print({SECRET})", RIGHT], [None] * 3, columns)
    assert component(rows) == [1.0, 1.0, None]


def test_columns_by_other_names():
    component = code(test="t", entry_point="e", prompt="p", cases="io")
    row = {"t": f"def check(c):\n    assert c(1) == {SECRET}", "e": "f", "p": "def f(x):\n"}
    assert component(batch([RIGHT], row)) == [1.0]
    assert component(batch(["print(3)"], {"io": [("", "3")]})) == [1.0]
    with pytest.raises(UsageError, match=r"'t' and 'e' .*or 'io' .*there are: other, test"):
        component(batch(["x"], {"test": "x", "other": "y"}))
    component.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 0}, "reward.code.timeout must be a number of seconds above 0, got 0"),
        ({"timeout": True}, "reward.code.timeout"),
        ({"workers": 0}, "reward.code.workers must be a whole number from 1, got 0"),
        ({"memory": 10}, "reward.code.memory must be a whole number from 64"),
        ({"processes": 1.5}, "reward.code.processes"),
        ({"output": 0}, "reward.code.output"),
        ({"test": ""}, "reward.code.test must be the name of a column"),
        ({"exact": 1}, "reward.code.exact must be true or false"),
        ({"isolation": "none"}, "reward.code.isolation must be required or best, got 'none'"),
    ],
)
def test_options(options, message):
    with pytest.raises(UsageError, match=message):
        Code(**options)


def test_a_time_out_is_0_and_comes_in_time():
    component = code(timeout=0.7, workers=4)
    start = time.monotonic()
    slow = "    while True: pass\n"
    assert component(function_rows([slow] * 4)) == [0.0] * 4
    assert component(program_rows(["import time\ntime.sleep(60)"] * 4)) == [0.0] * 4
    assert time.monotonic() - start < 10
    component.close()


def test_a_sandbox_that_dies_is_started_again_and_so_are_its_answers():
    component = code(timeout=20.0, workers=2)
    results = []
    waiting = function_rows([f"    import time; time.sleep(1.5)\n    return {SECRET}\n"] * 2)
    thread = threading.Thread(target=lambda: results.extend(component(waiting)))
    thread.start()
    time.sleep(0.5)
    first = component._sandbox._server
    started = below(first.pid)
    first.kill()
    first.wait()
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
    thread.join()
    assert results == [1.0, 1.0]
    assert component._sandbox._server is not first
    component.close()
    component.close()
    assert component(function_rows([RIGHT])) == [1.0]
    component.close()


def test_a_sandbox_that_goes_on_failing_gives_no_score(component, monkeypatch):
    tried = []

    def fail(*_):
        tried.append(1)
        raise SandboxError("no more processes")

    monkeypatch.setattr(Sandbox, "start", fail)
    result = RewardSet({"code": component})(function_rows([RIGHT] * 2))
    assert all(math.isnan(score) for score in result.components["code"])
    assert result.errors[0] == "reward.code: row 0: SandboxError: no more processes"
    assert len(tried) == 4
    monkeypatch.setattr(Sandbox, "start", lambda *_: os.close(-1))
    assert isinstance(component(program_rows(["print(1)"]))[0], Unscored)
    monkeypatch.undo()
    assert component(function_rows([RIGHT])) == [1.0]


def test_nothing_stays_open(component):
    component(function_rows([RIGHT, "    return 0"]))
    before = os.listdir("/proc/self/fd")
    component(function_rows([RIGHT, "    return 0"]))
    component(program_rows(["print(1)", f"print({SECRET})"]))
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_trainer_that_is_killed_leaves_nothing_running(tmp_path):
    code(timeout=10.0).close()  # skips where it cannot be
    script = tmp_path / "trainer.py"
    script.write_text(
        "from tests.reward.code_tasks import function_rows\nfrom grpo_lightning.reward.code import Code\n"
        "Code()(function_rows(['    while True: pass\\n']))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    trainer = subprocess.Popen([sys.executable, script], env=environment)
    deadline = time.monotonic() + 60
    while len(started := below(trainer.pid)) < 7 and time.monotonic() < deadline:  # server, 2 x 3
        time.sleep(0.05)
    trainer.kill()
    trainer.wait()
    assert len(started) == 7
    while any(Path(f"/proc/{pid}").exists() for pid in started) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in started if Path(f"/proc/{pid}").exists()] == []


def test_it_says_once_how_isolated_it_is(caplog):
    reward_code._tell.cache_clear()
    component = code()
    with caplog.at_level("INFO", logger=reward_code.__name__):
        component(function_rows([RIGHT]))
        component(function_rows([RIGHT]))
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "reward.code: answers are isolated by: a user of its own, its own network namespace, its own process "
    )
    assert "NOT" not in record.getMessage()
    component.close()


def test_best_goes_on_and_says_what_is_missing():
    component = best(("user",))
    assert component(function_rows([RIGHT, "    return 0"])) == [1.0, 0.0]
    assert component(program_rows([f"print({SECRET})"])) == [1.0]
    said = component._sandbox.description
    assert said.startswith("a user of its own, limits; NOT by: its own network namespace (not in this test); ")
    component.close()


def denied(*names: str):
    """A machine that does not permit some features."""
    return lambda self, features: "Operation not permitted" if set(names) & set(features) else None


@pytest.mark.parametrize("name", ["network", "processes", "mounts"])
def test_required_refuses_what_is_not_isolated(monkeypatch, name):
    monkeypatch.setattr(Sandbox, "_problem", denied(name))
    with pytest.raises(UsageError, match=r"reward=code cannot isolate answers here \(.*Operation not permitted\)") as e:
        Code()
    assert "reward.code.isolation=best" in str(e.value)
    assert name not in Code(isolation="best")._sandbox.features


def test_root_that_cannot_become_another_user_is_refused_even_with_best(monkeypatch):
    monkeypatch.setattr(Sandbox, "_problem", denied("user"))
    monkeypatch.setattr(os, "getuid", lambda: 0)
    for isolation in ("required", "best"):
        with pytest.raises(UsageError, match="does not run answers as root, and this root cannot become another user"):
            Code(isolation=isolation)


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr("grpo_lightning.reward.sandbox.sys", SimpleNamespace(platform="darwin"))
    with pytest.raises(UsageError, match="this is darwin"):
        Sandbox("best", Limits(1, 1, 1, 1))


def humaneval() -> list[dict[str, str]]:
    with gzip.open(HUMANEVAL, "rt") as file:
        return [json.loads(line) for line in file]


def humaneval_scores(component: Code, tasks: list[dict[str, str]], answer) -> list[object]:
    columns = {name: [task[name] for task in tasks] for name in ("prompt", "test", "entry_point")}
    completions = [answer(task) for task in tasks]
    return component(RewardBatch([""] * len(tasks), completions, [None] * len(tasks), columns))


def full(task: dict[str, str]) -> str:
    return python(task["prompt"] + task["canonical_solution"])


def broken(task: dict[str, str]) -> str:
    return python(task["prompt"] + task["canonical_solution"] + CHANGED.format(name=task["entry_point"]))


ANSWERS = [(lambda task: task["canonical_solution"], 1.0), (full, 1.0), (broken, 0.0), (lambda _: "    pass\n", 0.0)]


@pytest.mark.skipif(not HUMANEVAL.exists(), reason="the shared data sets are not here")
@pytest.mark.parametrize(("answer", "score"), ANSWERS)
def test_a_dozen_of_humaneval(component, answer, score):
    tasks = [humaneval()[i] for i in (0, 1, 22, 32, 38, 50, 53, 87, 99, 115, 148, 163)]
    assert humaneval_scores(component, tasks, answer) == [score] * 12


@pytest.mark.heavy
@pytest.mark.skipif(not HUMANEVAL.exists(), reason="the shared data sets are not here")
@pytest.mark.parametrize(("answer", "score"), ANSWERS)
def test_all_of_humaneval(component, answer, score):
    tasks = humaneval()
    scores = humaneval_scores(component, tasks, answer)
    assert {task["task_id"]: got for task, got in zip(tasks, scores, strict=True) if got != score} == {}


def test_where_root_may_take_another_user_every_answer_has_its_own():
    if os.geteuid() != 0:
        pytest.skip("not root")
    child = os.fork()
    if child == 0:
        try:
            os.setresuid(65534, 65534, 65534)
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitpid(child, 0)[1] != 0:
        pytest.skip("root without the right to")
    component = Code(isolation="best")
    assert component._sandbox.description.startswith("a user of its own")
    component.close()
