"""reward=http against a real server in a thread that is slow, fails, and answers nonsense as told."""

import itertools
import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from grpo_lightning.errors import RunError, UsageError
from grpo_lightning.reward import RewardBatch, RewardSet
from grpo_lightning.reward.http import Http


class Scorer(ThreadingHTTPServer):
    """Answers with the number that each completion is. `script`: what to do instead with the next requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[Any] = []
        self.seen: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.lock = threading.Lock()
        self.under_way = self.most = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/score"


class Handler(BaseHTTPRequestHandler):
    server: Scorer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.seen.append(body)
            server.tokens.append(self.headers["Authorization"])
            act = server.script.pop(0) if server.script else None
            server.under_way += 1
            server.most = max(server.most, server.under_way)
        try:
            answer = act(self, body) if callable(act) else act
            if answer is None:
                answer = {"scores": [float(text) for text in body["completions"]]}
            if answer == "said":
                return
            status, payload = (answer, {"error": "not\nnow"}) if isinstance(answer, int) else (200, answer)
            data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        finally:
            with server.lock:
                server.under_way -= 1

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def scorer():
    server = Scorer()
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def http(scorer: Scorer, **options: Any) -> Http:
    return Http(scorer.url, **{"backoff": 0.01, "timeout": 5.0} | options)


def batch(n: int) -> RewardBatch:
    return RewardBatch(
        ["q"] * n,
        [str(i) for i in range(n)],
        ["a"] * n,
        {"level": list(range(n)), "kind": [{"k": [i]} for i in range(n)]},
    )


def sleep(seconds: float) -> Any:
    return lambda handler, body: time.sleep(seconds)


def drop(handler: Handler, body: Any) -> str:
    handler.close_connection = True
    handler.connection.close()
    return "said"


def trickle(handler: Handler, body: Any) -> str:
    """A byte now and then, each of which resets a time-out that waits for the next one."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    try:
        for _ in range(400):
            handler.wfile.write(b" ")
            time.sleep(0.05)
    except OSError:
        pass
    return "said"


def test_what_is_asked_and_in_what_order_it_comes(scorer):
    assert http(scorer, batch_size=3)(batch(8)) == [float(i) for i in range(8)]
    first = min(scorer.seen, key=lambda body: body["completions"])
    assert first == {
        "prompts": ["q"] * 3, "completions": ["0", "1", "2"], "answers": ["a"] * 3,
        "columns": {"level": [0, 1, 2], "kind": [{"k": [0]}, {"k": [1]}, {"k": [2]}]},
    }  # fmt: skip
    assert sorted(len(body["completions"]) for body in scorer.seen) == [2, 3, 3]
    assert scorer.tokens == [None] * 3


def test_the_slowest_first_keeps_the_order(scorer):
    scorer.script = [sleep(0.3), sleep(0.1)]
    assert http(scorer, batch_size=2)(batch(6)) == [float(i) for i in range(6)]


def test_requests_at_once(scorer):
    scorer.script = [sleep(0.4)] * 8
    assert http(scorer, batch_size=1, at_once=4)(batch(8)) == [float(i) for i in range(8)]
    assert scorer.most == 4


def test_columns_and_token(scorer, monkeypatch):
    monkeypatch.setenv("SCORER_TOKEN", "hush")
    http(scorer, columns=["level"], token_env="SCORER_TOKEN")(batch(2))
    assert scorer.seen[0]["columns"] == {"level": [0, 1]} and scorer.tokens == ["Bearer hush"]
    http(scorer, columns=[])(batch(2))
    assert scorer.seen[1]["columns"] == {}
    with pytest.raises(
        UsageError, match=r"reward\.http\.columns: lvl is no column of the data; there are: kind, level"
    ):
        http(scorer, columns=["lvl"])(batch(2))


NONSENSE = [
    500, 503, 429, 408, drop, b"not json", b'{"scores": 1}', {"score": [0, 1]}, [0.0, 1.0], {"scores": [0.0]},
    {"scores": [0.0, 1.0, 2.0]}, {"scores": []},
]  # fmt: skip


@pytest.mark.parametrize("fault", NONSENSE)
def test_it_recovers_after_a_retry(scorer, fault):
    scorer.script = [fault, fault]
    assert http(scorer, retries=2)(batch(2)) == [0.0, 1.0]
    assert len(scorer.seen) == 3


@pytest.mark.parametrize("fault", NONSENSE)
def test_after_the_last_retry_the_rows_have_no_score_and_the_run_goes_on(scorer, fault, caplog):
    scorer.script = [fault] * 3
    result = RewardSet({"http": http(scorer, retries=2)})(batch(2))
    assert all(math.isnan(score) for score in result.components["http"]) and len(scorer.seen) == 3
    assert [line.startswith(f"reward.http: row {i}: {scorer.url}: ") for i, line in enumerate(result.errors)] == [
        True
    ] * 2
    assert len(caplog.messages) == 1 and "2 of 2 rows have no such score" in caplog.text
    assert RewardSet({"http": http(scorer)})(batch(2)).total == [0, 1]


def test_one_request_failing_costs_its_rows_only(scorer):
    def fails(handler: Handler, body: Any) -> int | None:
        return 500 if "2" in body["completions"] else None

    scorer.script = [fails] * 20
    scores = RewardSet({"http": http(scorer, batch_size=2, retries=1)})(batch(6)).components["http"]
    assert scores[:2] == [0, 1] and math.isnan(scores[2]) and math.isnan(scores[3]) and scores[4:] == [4, 5]


@pytest.mark.parametrize("slow", [sleep(20.0), trickle])
def test_a_slow_server(scorer, slow):
    scorer.script = [slow, slow]
    start = time.perf_counter()
    scores = http(scorer, timeout=0.2, retries=1)(batch(2))
    assert time.perf_counter() - start < 5
    assert all(str(score).endswith("no answer within 0.2 s") for score in scores)
    scorer.script = [slow]
    assert http(scorer, timeout=1.5, retries=1)(batch(2)) == [0.0, 1.0]


def test_waiting_for_a_free_place_does_not_use_up_the_time(scorer):
    scorer.script = [sleep(0.4)] * 5
    assert http(scorer, batch_size=1, at_once=1, timeout=1.5, retries=0)(batch(5)) == [float(i) for i in range(5)]


def test_the_pause_before_a_retry_doubles(scorer):
    times = []
    scorer.script = [lambda handler, body: times.append(time.perf_counter()) or 500] * 4
    http(scorer, retries=3, backoff=0.1)(batch(1))
    pauses = [b - a for a, b in itertools.pairwise(times)]
    assert all(pause > least for pause, least in zip(pauses, (0.09, 0.19, 0.39), strict=True))


def test_no_server_at_all():
    result = RewardSet({"http": Http("http://127.0.0.1:1/score", retries=1, backoff=0.01)})(batch(3))
    assert all(math.isnan(score) for score in result.total) and "ConnectError" in result.errors[0]


def test_single_scores_that_are_none(scorer):
    scorer.script = [b'{"scores": [null, NaN, Infinity, "1", 1, true, [1]]}']
    result = RewardSet({"http": http(scorer)})(batch(7))
    assert [math.isnan(score) for score in result.total] == [True] * 4 + [False] * 2 + [True]
    assert result.total[4:6] == [1, 1]
    assert [line.split(": ")[1] for line in result.errors] == ["row 1", "row 2", "row 3", "row 6"]
    assert len(scorer.seen) == 1


@pytest.mark.parametrize("status", [401, 404, 422, 301])
def test_a_refusal_at_first_ends_the_run_and_later_costs_its_rows(scorer, status):
    component = http(scorer)
    scorer.script = [status]
    with pytest.raises(RunError, match=rf"reward\.http: {scorer.url} refuses: status {status}: .*not") as error:
        RewardSet({"http": component})(batch(2))
    assert "\n" not in str(error.value) and len(scorer.seen) == 1
    assert component(batch(2)) == [0.0, 1.0]
    scorer.script = [status]
    assert math.isnan(RewardSet({"http": component})(batch(2)).total[0])
    assert len(scorer.seen) == 3  # not asked again


def test_what_json_cannot_carry(scorer):
    rows = RewardBatch(["q"], ["1"], ["a"], {"when": [object()]})
    with pytest.raises(UsageError, match=r"reward\.http cannot send the data as JSON.*reward\.http\.columns"):
        http(scorer)(rows)
    assert http(scorer, columns=[])(rows) == [1.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": None}, r"reward\.http\.url must be an address"),
        ({"url": "localhost:8000"}, r"reward\.http\.url must be an address"),
        ({"batch_size": 0}, r"reward\.http\.batch_size must be a whole number from 1"),
        ({"at_once": True}, r"reward\.http\.at_once must be a whole number from 1"),
        ({"retries": -1}, r"reward\.http\.retries must be a whole number from 0"),
        ({"timeout": 0}, r"reward\.http\.timeout must be a number of seconds above 0"),
        ({"backoff": math.inf}, r"reward\.http\.backoff must be a number of seconds above 0"),
        ({"columns": "level"}, r"reward\.http\.columns must be a list of names"),
        (
            {"token_env": "NO_SUCH_TOKEN"},
            r"reward\.http\.token_env=NO_SUCH_TOKEN: the environment has no such variable",
        ),
    ],
)
def test_options(options, message):
    with pytest.raises(UsageError, match=message):
        Http(**{"url": "http://127.0.0.1:1"} | options)
