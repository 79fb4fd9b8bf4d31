"""`data=file`: prompts and answers from a local file, a folder, or a data set of the Hugging Face hub."""

import difflib
import json
import math
import re
from pathlib import Path
from typing import Any

from grpo_lightning.data.prompts import Item
from grpo_lightning.data.read import Row, has_known_suffix, read_file
from grpo_lightning.data.split import split
from grpo_lightning.errors import UsageError

_HELD_OUT_NAMES = ("validation", "valid", "val", "test")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class File:
    """Rows with named columns, of which one is the prompt (text or chat messages) and one the answer.

    path: a JSONL, JSON, CSV or Parquet file, a folder with train.* and validation.* or test.* files, or a hub id.
    prompt, answer: names of the columns; `answer` may be None where only the prompt matters to the reward.
    answer_pattern: a regular expression; the first group of its last match is the answer.
    val_path: a file with the held-out rows. Without, a folder's own held-out file, else rows of the data.
    name: the configuration of a hub data set.
    limit: at most this many training prompts, the first ones.
    distinct: the text by which rows differ, a template like data.template (which it follows in the configuration).
    Raises UsageError for everything that is wrong with options or files.
    """

    def __init__(
        self,
        path: str | None,
        prompt: str = "prompt",
        answer: str | None = "answer",
        answer_pattern: str | None = None,
        val_path: str | None = None,
        name: str | None = None,
        limit: int | None = None,
        distinct: str = "{prompt}",
    ):
        if not path:
            raise UsageError("data.path is needed: a file, a folder or a data set of the Hugging Face hub")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise UsageError(f"data.limit must be at least 1 or null, got {limit!r}")
        try:
            self.answer_pattern = None if answer_pattern is None else re.compile(answer_pattern)
        except (re.error, TypeError) as error:
            raise UsageError(f"data.answer_pattern {answer_pattern!r} is no regular expression: {error}") from None
        self.path = path
        self.prompt = prompt
        self.answer = answer
        self.val_path = val_path
        self.name = name
        self.limit = limit
        self.distinct = distinct
        self.duplicates = 0

    def load(self, eval_prompts: int) -> tuple[list[Item], list[Item]]:
        """Training items and `eval_prompts` held-out items, disjoint by content."""
        train_rows, held_out_rows = self._rows()
        if self.val_path is not None:
            held_out_rows = self._read([_existing(self.val_path, "data.val_path")])
        train = self._items(train_rows)
        held_out = None if held_out_rows is None else self._items(held_out_rows)
        parts = split(train, eval_prompts, self.distinct, held_out)
        self.duplicates = parts.duplicates
        return parts.train[: self.limit], parts.held_out

    def _rows(self) -> tuple[list[Row], list[Row] | None]:
        path = Path(self.path).expanduser()
        here = path.exists() or has_known_suffix(path) or ("/" in self.path and path.parent.exists())
        if not here and _HUB_ID.fullmatch(self.path):
            return _hub(self.path, self.name)
        path = _existing(self.path, "data.path")
        if path.is_file():
            return self._read([path]), None
        train = _files(path, "train")
        if not train:
            there = sorted(entry.name for entry in path.iterdir() if has_known_suffix(entry))
            raise UsageError(
                f"data.path={self.path} is a folder without a train file; "
                + (f"give one of its files: {', '.join(there[:8])}" if there else "it has no file that can be read")
            )
        held_out = next((files for name in _HELD_OUT_NAMES if (files := _files(path, name))), None)
        return self._read(train), None if held_out is None else self._read(held_out)

    def _read(self, files: list[Path]) -> list[Row]:
        text_columns = (self.prompt,) if self.answer is None else (self.prompt, self.answer)
        return [row for file in files for row in read_file(file, text_columns)]

    def _items(self, rows: list[Row]) -> list[Item]:
        return [self._item(where, row) for where, row in rows]

    def _item(self, where: str, row: dict[str, Any]) -> Item:
        for option, column in (("prompt", self.prompt), ("answer", self.answer)):
            if column is not None and column not in row:
                hint = " (data.answer=null if it has no answers)" if option == "answer" else ""
                raise UsageError(f"{where}: no column {column!r} for data.{option}{hint}; there are: {', '.join(row)}")
        return Item(_prompt(row[self.prompt], where, self.prompt), self._answer(where, row), row)

    def _answer(self, where: str, row: dict[str, Any]) -> str | None:
        value = None if self.answer is None else row[self.answer]
        if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
            return None
        if hasattr(value, "__len__") and not isinstance(value, str):
            raise UsageError(f"{where}: the answer {self.answer!r} must be text or a number, got {str(value)[:60]}")
        text = str(value)
        if self.answer_pattern is None:
            return text
        matches = list(self.answer_pattern.finditer(text))
        if not matches:
            pattern = self.answer_pattern.pattern
            raise UsageError(f"{where}: data.answer_pattern {pattern!r} is not in the answer {text[-60:]!r}")
        return matches[-1][1 if self.answer_pattern.groups else 0].strip()


def _prompt(value: Any, where: str, column: str) -> str | list[dict[str, str]]:
    if hasattr(value, "tolist") and not isinstance(value, str):  # a list in a Parquet file
        value = value.tolist()
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value and all(_is_message(message) for message in value):
        return [{"role": message["role"], "content": message["content"]} for message in value]
    shown = json.dumps(value, default=str)[:60]
    raise UsageError(f"{where}: the prompt {column!r} must be text or a list of role/content messages, got {shown}")


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _existing(path: str, option: str) -> Path:
    found = Path(path).expanduser()
    if not found.exists():
        folder = found.parent
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        close = difflib.get_close_matches(found.name, names, n=1)
        raise UsageError(f"{option}={path} does not exist" + (f"; did you mean {folder / close[0]}?" if close else ""))
    return found


def _files(folder: Path, name: str) -> list[Path]:
    """train.jsonl, or the shards train-00000-of-00002.parquet, ... of a part."""
    pattern = re.compile(rf"{name}(-\d+-of-\d+)?\.\w+(\.gz)?")
    return sorted(entry for entry in folder.iterdir() if pattern.fullmatch(entry.name) and has_known_suffix(entry))


def _hub(path: str, name: str | None) -> tuple[list[Row], list[Row] | None]:
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"data.path={path} is no file or folder here; to load it from the Hugging Face hub: pip install datasets"
        ) from None
    try:
        parts = datasets.load_dataset(path, name)
    except Exception as error:  # the library's, the hub's and the network's errors are of many kinds
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UsageError(
            f"data.path={path} is no file or folder here and cannot be loaded from the Hugging Face hub ({reason})"
        ) from error
    held_out = next((part for part in _HELD_OUT_NAMES if part in parts), None)
    train = "train" if "train" in parts else next(part for part in parts if part != held_out or len(parts) == 1)
    rows = {
        part: [(f"{path} {part} row {i}", dict(row)) for i, row in enumerate(parts[part], start=1)]
        for part in (train, held_out)
        if part is not None
    }
    return rows[train], None if held_out in (None, train) else rows[held_out]
