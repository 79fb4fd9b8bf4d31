"""`reward=function`: any Python function by its dotted path, also with the signature that TRL's users have."""

import difflib
import importlib
import inspect
import math
import multiprocessing
import multiprocessing.pool
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from grpo_lightning.errors import UsageError
from grpo_lightning.reward.score import RewardBatch, Unscored

_START_SECONDS = 300.0


class Function:
    """Calls `f(prompts=..., completions=..., **columns)` and takes a number or None per completion from it.

    The function gets only what its signature names (everything if it has `**kwargs`): `prompts`, `completions`
    (strings), `completion_ids`, `answer`, and the columns of the data.

    path: "package.module.function" (modules in the current directory count), or a callable, as Hydra's
        `{_target_: my_module.fn, _partial_: true, ...}` makes one.
    kwargs: further keyword arguments for the function; they win over columns of the same name.
    timeout: None calls it in this process. A number of seconds for one call, with all the completions of this process,
        calls it in a process of its own, which is ended where it takes longer; those rows then have no score.
    Raises UsageError if the path does not lead to a callable, or if the function wants what is not there.
    """

    def __init__(
        self,
        path: str | Callable[..., Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        weight: float = 1.0,
        correctness: bool = False,
    ):
        if path is None:
            raise UsageError("reward.function.path is needed, for example reward.function.path=my_module.my_function")
        self.function = locate(path) if isinstance(path, str) else path
        self.name = path if isinstance(path, str) else _name(path)
        check_function(self.function, f"reward.function.path={self.name}")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise UsageError(f"reward.function.kwargs must be a mapping of keyword arguments, got {kwargs!r}")
        if timeout is not None:
            if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
                raise UsageError(f"reward.function.timeout must be seconds above 0 or null, got {timeout!r}")
            if not isinstance(path, str):
                raise UsageError("reward.function.timeout needs a dotted path: another process cannot get this object")
        self.kwargs = dict(kwargs or {})
        self.timeout = timeout
        self._pool: multiprocessing.pool.Pool | None = None
        self.weight = weight
        self.correctness = correctness

    @property
    def calling_thread(self) -> bool:
        """It may use signals, as math-verify does, and only a process's main thread can."""
        return self.timeout is None

    def __call__(self, batch: RewardBatch) -> Any:
        offered: dict[str, Any] = {**batch.columns, "answer": batch.answers, **self.kwargs}
        offered |= {
            "prompts": batch.prompts,
            "completions": batch.completions,
            "completion_ids": batch.completion_ids,
        }
        return call(self.function, self.name, offered) if self.timeout is None else self._call_apart(offered)

    def _call_apart(self, offered: dict[str, Any]) -> Any:
        if self._pool is None:
            self._pool = multiprocessing.get_context("spawn").Pool(1)
            self._pool.apply_async(locate, (self.name,)).get(_START_SECONDS)  # its imports take no time of a call
        try:
            return self._pool.apply_async(_call_located, (self.name, offered)).get(self.timeout)
        except multiprocessing.TimeoutError:
            self.close()
            raise Unscored(f"{self.name} took longer than {self.timeout:g} s") from None

    def close(self) -> None:
        """End the process. A later call starts another one."""
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()
            self._pool = None


def _call_located(path: str, offered: dict[str, Any]) -> Any:
    return call(locate(path), path, offered)


def call(function: Callable[..., Any], name: str, offered: Mapping[str, Any]) -> Any:
    """Calls the function with what its signature names of `offered`, with everything if it has `**kwargs`.

    Raises UsageError if it wants what is not there.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for wanted in named:
        if wanted not in offered and parameters[wanted].default is inspect.Parameter.empty:
            raise UsageError(
                f"reward function {name} wants `{wanted}`, which is no column of the data; "
                f"there are: {', '.join(sorted(offered))}"
            )
    return function(**(offered if takes_all else {n: offered[n] for n in named if n in offered}))


def locate_function(path: str, option: str) -> Callable[..., Any]:
    """The function at a dotted path. Raises UsageError naming the option."""
    found = locate(path, option)
    check_function(found, f"{option}={path}")
    return found  # type: ignore[no-any-return]  # it is callable


def check_function(found: Any, what: str) -> None:
    if not callable(found):
        raise UsageError(f"{what} is no function but {type(found).__name__}")
    if inspect.isclass(found):
        raise UsageError(f"{what} is a class; give a function or an object of it")
    if inspect.iscoroutinefunction(found):
        raise UsageError(f"{what} is a coroutine; an ordinary function is needed")


def locate(path: str, option: str = "reward.function.path") -> Any:
    """The object at a dotted path. Raises UsageError naming the part that is missing and the closest name."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script does not look there by itself
    module_name, _, rest = path.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in path.split(".")):
        raise UsageError(f"{option} must be a dotted path such as my_module.my_function, got {path!r}")
    names = [rest]
    while True:
        try:
            found: Any = importlib.import_module(module_name)
            break
        except ModuleNotFoundError as error:
            # the module itself may be an attribute (a class), a missing import inside of it is the user's to see
            if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
                raise UsageError(f"{option}={path}: importing {module_name} failed: {error}") from error
            if "." not in module_name:
                hint = _closest(module_name, _modules_here())
                raise UsageError(
                    f"{option}={path}: there is no module {module_name!r} "
                    f"(looked in the current directory and in what is installed){hint}"
                ) from None
            module_name, _, last = module_name.rpartition(".")
            names.insert(0, last)
        except Exception as error:
            raise UsageError(
                f"{option}={path}: importing {module_name} failed: {type(error).__name__}: {error}"
            ) from error
    for name in names:
        if not hasattr(found, name):
            raise UsageError(f"{option}={path}: {module_name} has no {name!r}{_closest(name, dir(found))}")
        found = getattr(found, name)
    return found


def _modules_here() -> list[str]:
    return [entry.removesuffix(".py") for entry in os.listdir() if entry.endswith(".py") or os.path.isdir(entry)]


def _closest(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _name(function: Any) -> str:
    """A name for any callable: functools.partial and callable objects have no `__name__`."""
    inner = getattr(function, "func", function)
    return str(getattr(inner, "__name__", type(inner).__name__))
