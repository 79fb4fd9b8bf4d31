"""Reads rows from JSONL, JSON, CSV and Parquet files. Every row keeps the place it came from, for messages."""

import gzip
import json
from pathlib import Path
from typing import Any

from grpo_lightning.errors import UsageError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
Row = tuple[str, dict[str, Any]]  # ("file:line", columns)


def has_known_suffix(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith(SUFFIXES)


def read_file(path: Path, text_columns: tuple[str, ...]) -> list[Row]:
    """The rows of one file, all with the same columns (None where a row has no value).

    text_columns: columns of a CSV file that stay text ("007" is not 7).
    Raises UsageError naming file and line for anything that cannot be read, and for a file without rows.
    """
    kind = Path(path.name.removesuffix(".gz")).suffix
    try:
        if kind == ".parquet":
            rows = _parquet(path)
        elif kind in (".csv", ".tsv"):
            rows = _csv(path, "\t" if kind == ".tsv" else ",", text_columns)
        elif kind in (".jsonl", ".ndjson", ".json"):
            with (
                gzip.open(path, "rt", encoding="utf-8-sig")
                if path.suffix == ".gz"
                else path.open(encoding="utf-8-sig") as file
            ):
                text = file.read()
            rows = _json(path, text) if kind == ".json" else _jsonl(path, text)
        else:
            raise UsageError(f"{path}: unknown kind of file; readable are {', '.join(SUFFIXES)}")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not rows:
        raise UsageError(f"{path} is empty: it has no rows")
    columns = dict.fromkeys(name for _, row in rows for name in row)
    return [(where, {name: row.get(name) for name in columns}) for where, row in rows]


def _jsonl(path: Path, text: str) -> list[Row]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UsageError(f"{path}:{number}: not valid JSON ({error.msg}, column {error.colno})") from None
            rows.append((f"{path}:{number}", _object(row, f"{path}:{number}")))
    return rows


def _json(path: Path, text: str) -> list[Row]:
    if not text.strip():
        return []
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # one object per line under the other name
            return _jsonl(path, text)
        raise UsageError(f"{path}:{error.lineno}: not valid JSON ({error.msg}, column {error.colno})") from None
    if isinstance(data, dict):
        return [(f"{path}:1", data)]
    if not isinstance(data, list):
        raise UsageError(f"{path}: must hold a list of objects, got {type(data).__name__}")
    return [(f"{path} entry {i}", _object(row, f"{path} entry {i}")) for i, row in enumerate(data, start=1)]


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UsageError(f"{where}: must be an object with named columns, got {json.dumps(row)[:60]}")
    return row


def _csv(path: Path, separator: str, text_columns: tuple[str, ...]) -> list[Row]:
    import pandas

    try:
        frame = pandas.read_csv(
            path, sep=separator, dtype={name: str for name in text_columns}, keep_default_na=False, na_values=[""]
        )
    except pandas.errors.EmptyDataError:
        return []
    except (pandas.errors.ParserError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    return _records(path, frame)


def _parquet(path: Path) -> list[Row]:
    import pandas
    import pyarrow

    try:
        return _records(path, pandas.read_parquet(path))
    except pyarrow.ArrowException as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def _records(path: Path, frame: Any) -> list[Row]:
    records = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return [(f"{path} row {i}", row) for i, row in enumerate(records, start=1)]
