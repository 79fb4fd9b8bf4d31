"""What runs in a runner of sandbox_child.py: the answer as a program, its function, or the judge of that function.

The judge has the tests and the answer's process has the answer. Between them go arguments and results, as plain data.
"""

import builtins
import contextlib
import importlib
import json
import os
import re
import socket
import struct
import sys
import types
from typing import Any

FRAME = 16 * 2**20  # bytes of arguments or of a result
COMMON = (
    "bisect collections copy dataclasses datetime functools hashlib heapq itertools math operator random statistics "
    "string threading typing"
)
for module_name in COMMON.split():  # what most answers import, so that it is loaded once and not in every runner
    importlib.import_module(module_name)


def run(kind: str, descriptors: list[int]) -> None:
    with open(descriptors[0], "rb") as file:
        job = json.load(file)
    if kind == "program":
        program(job, *descriptors[1:])
    elif kind == "function":
        answer_calls(job, socket.socket(fileno=descriptors[1]))
    elif kind == "judge":
        judge(job, socket.socket(fileno=descriptors[1]), descriptors[2])


def program(job: dict[str, Any], given: int, written: int) -> None:
    """The answer as the main module, with its own standard input and output. It ends as Python does."""
    for source, target in ((given, 0), (written, 1)):
        os.dup2(source, target)
        os.close(source)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.argv = ["answer.py"]
    exec(compile(job["code"], "answer.py", "exec"), new_module("__main__"))
    sys.stdout.flush()


def answer_calls(job: dict[str, Any], judge: socket.socket) -> None:
    """Defines the answer's function and calls it with what the judge sends."""
    module = new_module("answer")
    define(job, module)
    function = module[job["entry_point"]]
    while True:
        arguments, keywords = decode(receive(judge))
        try:
            reply = {"value": encode(function(*arguments, **dict(keywords)))}
        except BaseException as error:
            reply = {"raised": type(error).__name__}
        send(judge, reply)


def define(job: dict[str, Any], module: dict[str, Any]) -> None:
    prompt, code = job["prompt"], job["code"]
    if job["continues"]:
        try:
            compiled = compile(prompt + code, "answer.py", "exec")
        except SyntaxError:  # what a model writes behind the function's body
            body = re.split(r"\n(?=[^\s#])", "\n" + code, maxsplit=1)[0][1:]
            compiled = compile(prompt + body, "answer.py", "exec")
        exec(compiled, module)
        return
    with contextlib.suppress(SyntaxError):  # imports and helpers that the answer may leave out
        exec(compile(prompt, "prompt.py", "exec"), module)
    exec(compile(code, "answer.py", "exec"), module)


def judge(job: dict[str, Any], answer: socket.socket, verdict: int) -> None:
    """Runs the tests on a stand-in for the answer's function, and says how they ended."""
    module = new_module("tests")
    lost = False

    def candidate(*arguments: Any, **keywords: Any) -> Any:
        nonlocal lost
        request = encode([arguments, keywords])
        try:
            send(answer, request)
            reply = receive(answer)
            if "value" in reply:
                return decode(reply["value"])
            kind = getattr(builtins, reply["raised"], None)
        except BaseException:
            lost = True
            raise
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            kind = RuntimeError
        raise kind("raised by the answer")

    try:
        with contextlib.suppress(SyntaxError):
            exec(compile(job["prompt"], "prompt.py", "exec"), module)
        module[job["entry_point"]] = candidate
        exec(compile(job["test"], "test.py", "exec"), module)
        check = module["check"]
    except BaseException as error:
        os.write(verdict, f"no test: {type(error).__name__}: {error}".encode(errors="replace")[:1000])
        return
    try:
        check(candidate)
    except BaseException as error:
        os.write(verdict, f"failed: {type(error).__name__}".encode())
    else:
        os.write(verdict, b"failed: no answer" if lost else b"passed")
    os._exit(0)  # saves the interpreter's own end


def new_module(name: str) -> dict[str, Any]:
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module.__dict__


# --- what judge and answer say to each other: JSON with the types it lacks as {"type": parts} ---


def send(channel: socket.socket, message: Any) -> None:
    data = json.dumps(message).encode()
    channel.sendall(struct.pack("!I", len(data)) + data)


def receive(channel: socket.socket) -> Any:
    with channel.makefile("rb") as file:
        (size,) = struct.unpack("!I", file.read(4))
        if size > FRAME:
            raise ValueError("too long")
        return json.loads(file.read(size))


def encode(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return {"int": hex(value)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {type(value).__name__: value.hex()}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(part) for part in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(part)] for key, part in value.items()]}
    raise TypeError(f"{type(value).__name__} cannot be handed over")


def decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, parts),) = value.items()
    if kind == "int":
        return int(parts, 16)
    if kind == "complex":
        return complex(*parts)
    if kind in ("bytes", "bytearray"):
        return getattr(builtins, kind).fromhex(parts)
    if kind == "dict":
        return {decode(key): decode(part) for key, part in parts}
    if kind in ("list", "tuple", "set", "frozenset"):
        return getattr(builtins, kind)([decode(part) for part in parts])
    raise ValueError(f"no type {kind!r}")
