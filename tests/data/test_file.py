"""Local files of every kind, and each way in which they can be wrong."""

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest

from grpo_lightning.data.file import File
from grpo_lightning.errors import UsageError
from grpo_lightning.reward.answer import whole_number

ROWS = [{"prompt": f"What is {i}+1?", "answer": str(i + 1), "level": i % 3} for i in range(20)]
SHARED = Path(__file__).parents[3] / "shared" / "data"


def jsonl(path: Path, rows=ROWS) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_every_kind_of_file_gives_the_same_items(tmp_path):
    frame = pandas.DataFrame(ROWS)
    jsonl(tmp_path / "a.jsonl")
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    jsonl(tmp_path / "lines.json")
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_csv(tmp_path / "a.tsv", index=False, sep="\t")
    frame.to_parquet(tmp_path / "a.parquet")
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write((tmp_path / "a.jsonl").read_text())
    loaded = {path.name: File(str(path)).load(4) for path in tmp_path.iterdir()}
    assert len(loaded) == 7
    for train, held_out in loaded.values():
        assert (train, held_out) == loaded["a.jsonl"]
        assert len(train) == 16 and len(held_out) == 4
    item = min(loaded["a.jsonl"][0] + loaded["a.jsonl"][1], key=lambda item: len(item.prompt))
    assert item.columns["level"] == (int(item.answer) - 1) % 3
    assert item.columns["prompt"] == item.prompt


def test_numbers_as_answers(tmp_path):
    rows = [{"prompt": f"q{i}", "answer": a} for i, a in enumerate([43.0, 39, "1,234", True, None, "", float("nan")])]
    train, _ = File(jsonl(tmp_path / "a.jsonl", rows)).load(0)
    assert [item.answer for item in train] == ["43.0", "39", "1,234", "True", None, None, None]
    (tmp_path / "a.csv").write_text("prompt,answer,n\nq0,007,1\nq1,,2\nNA,43.0,\n")
    train, _ = File(str(tmp_path / "a.csv")).load(0)
    assert [(item.prompt, item.answer, item.columns["n"]) for item in train] == [
        ("q0", "007", 1),
        ("q1", None, 2),
        ("NA", "43.0", None),
    ]


def test_rows_without_a_column_have_none_there(tmp_path):
    train, _ = File(jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "answer": 1}, {"prompt": "b", "x": 2}])).load(0)
    assert [item.columns for item in train] == [
        {"prompt": "a", "answer": 1, "x": None},
        {"prompt": "b", "answer": None, "x": 2},
    ]


def test_answer_pattern_takes_the_last_match(tmp_path):
    rows = [{"prompt": "q", "answer": "1 #### 2 \n#### 1,234 "}]
    path = jsonl(tmp_path / "a.jsonl", rows)
    assert File(path, answer_pattern=r"####\s*(.+)").load(0)[0][0].answer == "1,234"
    assert File(path, answer_pattern=r"\d+").load(0)[0][0].answer == "234"
    with pytest.raises(UsageError, match=rf"{path}:1: data\.answer_pattern 'x=\(\.\)' is not in the answer"):
        File(path, answer_pattern="x=(.)").load(0)
    with pytest.raises(UsageError, match=r"data\.answer_pattern '\(' is no regular expression"):
        File(path, answer_pattern="(")


def test_chat_messages(tmp_path):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "2+3"}]
    rows = [{"prompt": messages, "answer": "5"}]
    assert File(jsonl(tmp_path / "a.jsonl", rows)).load(0)[0][0].prompt == messages
    pandas.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    assert File(str(tmp_path / "a.parquet")).load(0)[0][0].prompt == messages


def test_a_folder_with_its_own_held_out_file(tmp_path):
    jsonl(tmp_path / "train-00000-of-00002.jsonl", ROWS[:10])
    jsonl(tmp_path / "train-00001-of-00002.jsonl", ROWS[10:])
    held_out = [{"prompt": f"other {i}", "answer": "1"} for i in range(5)]
    jsonl(tmp_path / "test.jsonl", [*held_out, {"prompt": "WHAT is  3+1?", "answer": "4"}])
    data = File(str(tmp_path))
    train, chosen = data.load(3)
    assert len(chosen) == 3 and len(train) == 19  # one training row is in the test file, chosen or not
    assert data.duplicates == 1
    assert data.load(6)[0] == train
    with pytest.raises(UsageError, match=r"eval\.prompts=7, but the held-out file has 6 different prompts"):
        data.load(7)
    jsonl(tmp_path / "validation.jsonl", held_out[:2])
    assert {item.prompt for item in data.load(2)[1]} == {"other 0", "other 1"}


def test_val_path(tmp_path):
    path = jsonl(tmp_path / "a.jsonl")
    val_path = jsonl(tmp_path / "b.jsonl", [*ROWS[:2], {"prompt": "new", "answer": "1"}])
    train, held_out = File(path, val_path=val_path).load(3)
    assert len(train) == 18 and len(held_out) == 3
    with pytest.raises(UsageError, match=r"data\.val_path=.*does not exist; did you mean .*b\.jsonl"):
        File(path, val_path=str(tmp_path / "bb.jsonl")).load(3)


def test_limit_does_not_change_what_is_held_out(tmp_path):
    path = jsonl(tmp_path / "a.jsonl")
    train, held_out = File(path).load(4)
    assert File(path, limit=3).load(4) == (train[:3], held_out)


@pytest.mark.parametrize("limit", [0, -1, "3", True])
def test_bad_limit(limit):
    with pytest.raises(UsageError, match=r"data\.limit must be at least 1"):
        File("x.jsonl", limit=limit)


def message(path: object, **options) -> str:
    with pytest.raises(UsageError) as error:
        File(str(path), **options).load(1)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_missing_columns(tmp_path):
    path = jsonl(tmp_path / "a.jsonl")
    assert message(path, prompt="question") == (
        f"{path}:1: no column 'question' for data.prompt; there are: prompt, answer, level"
    )
    assert message(path, answer="target") == (
        f"{path}:1: no column 'target' for data.answer (data.answer=null if it has no answers); "
        "there are: prompt, answer, level"
    )
    assert File(path, answer=None).load(0)[0][0].answer is None


def test_malformed_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "answer": 1}\n\n{"prompt": "b", "answer": \n')
    assert message(path).startswith(f"{path}:3: not valid JSON (Expecting value")
    path.write_text('{"prompt": "a", "answer": 1}\n[1, 2]\n')
    assert message(path) == f"{path}:2: must be an object with named columns, got [1, 2]"
    path.write_text('{"prompt": "a", "answer": 1}\n{"prompt": null, "answer": 1}\n')
    assert message(path).startswith(f"{path}:2: the prompt 'prompt' must be text")
    path.write_text('{"prompt": "a", "answer": [1]}\n')
    assert message(path) == f"{path}:1: the answer 'answer' must be text or a number, got [1]"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    assert "cannot be read" in message(path)
    (tmp_path / "a.json").write_text('[{"prompt": "a"},\n {"prompt": }]')
    assert message(tmp_path / "a.json").startswith(f"{tmp_path / 'a.json'}:2: not valid JSON")
    (tmp_path / "a.json").write_text("3")
    assert "must hold a list of objects, got int" in message(tmp_path / "a.json")
    (tmp_path / "a.csv").write_text("prompt,answer\na,1\nb,2,3,4\n")
    assert "line 3" in message(tmp_path / "a.csv")
    (tmp_path / "a.parquet").write_bytes(b"no parquet at all")
    assert message(tmp_path / "a.parquet").startswith(f"{tmp_path / 'a.parquet'} cannot be read")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_empty_files(tmp_path, name):
    (tmp_path / name).write_text("")
    assert message(tmp_path / name) == f"{tmp_path / name} is empty: it has no rows"
    if name == "a.csv":
        (tmp_path / name).write_text("prompt,answer\n")
        assert "is empty" in message(tmp_path / name)


def test_paths_that_lead_nowhere(tmp_path):
    jsonl(tmp_path / "numbers.jsonl")
    assert message(tmp_path / "nmbers.jsonl").endswith(f"does not exist; did you mean {tmp_path / 'numbers.jsonl'}?")
    assert message(tmp_path / "numbers").endswith(f"does not exist; did you mean {tmp_path / 'numbers.jsonl'}?")
    assert message(tmp_path / "none" / "x.jsonl").endswith("does not exist")
    assert message(tmp_path).endswith("is a folder without a train file; give one of its files: numbers.jsonl")
    (tmp_path / "a.txt").write_text("x")
    assert "unknown kind of file" in message(tmp_path / "a.txt")
    (tmp_path / "empty").mkdir()
    assert "no file that can be read" in message(tmp_path / "empty")
    with pytest.raises(UsageError, match=r"data\.path is needed"):
        File(None)


def test_a_hub_data_set(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    asked = []

    def load_dataset(path, name):
        asked.append((path, name))
        return {"test": [{"prompt": "b", "answer": 2}], "train": ROWS}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    train, held_out = File("some/data", name="main").load(1)
    assert (asked, len(train), held_out[0].answer) == ([("some/data", "main")], 20, "2")
    assert "some/data train row 1: no column 'q'" in message("some/data", prompt="q")

    def offline(path, name):
        raise ConnectionError("cannot\nreach it")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=offline))
    assert message("some/data").endswith("from the Hugging Face hub (ConnectionError: cannot reach it)")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert message("some/data").endswith("pip install datasets")
    (tmp_path / "some").mkdir()  # then it must be a mistyped local path
    assert message("some/data") == "data.path=some/data does not exist"


@pytest.mark.skipif(not SHARED.exists(), reason="the shared data sets are not here")
@pytest.mark.parametrize(
    ("path", "options", "train", "held_out"),
    [
        ("gsm8k", {"prompt": "question", "answer_pattern": r"####\s*(.+)"}, 7473, 16),
        ("gsm8k/train.jsonl", {"prompt": "question", "answer_pattern": r"####\s*(.+)"}, 7457, 16),
        ("mawps/multiarith.jsonl", {"prompt": "input", "answer": "target"}, 564, 16),
        ("svamp/test.jsonl", {"prompt": "Question", "answer": "Answer", "distinct": "{Body} {prompt}"}, 984, 16),
        ("humaneval/HumanEval.jsonl.gz", {"answer": None}, 148, 16),
    ],
)
def test_real_files(path, options, train, held_out):
    parts = File(str(SHARED / path), **options).load(held_out)
    assert (len(parts[0]), len(parts[1])) == (train, held_out)
    if options.get("answer", "x") is not None:
        assert all(whole_number(item.answer) is not None for item in parts[0] + parts[1])
