"""`data=reasoning_gym`: any of reasoning-gym's generated tasks."""

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from grpo_lightning.data.prompts import Item
from grpo_lightning.data.split import split
from grpo_lightning.errors import UsageError


class ReasoningGym:
    """Questions of one task, generated with a seed of its own so that every run sees the same split.

    task: its name in reasoning-gym. task_config: options of the task, passed on.
    size: questions to generate, at least 1; training gets those that are left after the held-out ones and repetitions.
    The columns are `entry` (what reward=reasoning_gym needs) and `task`.
    Raises UsageError if reasoning-gym is missing or refuses the task or its options.
    """

    def __init__(
        self, task: str = "chain_sum", task_config: Mapping[str, Any] | None = None, size: int = 2000, seed: int = 0
    ):
        for name, value, least in (("size", size, 1), ("seed", seed, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"data.{name} must be a whole number from {least}, got {value!r}")
        if task_config is not None and not isinstance(task_config, Mapping):
            raise UsageError(f"data.task_config must be a mapping of the task's options, got {task_config!r}")
        self.task = task
        self.dataset = _create(task, dict(task_config or {}), size, seed)
        self.duplicates = 0

    def load(self, eval_prompts: int) -> tuple[list[Item], list[Item]]:
        """Training items and `eval_prompts` held-out items, disjoint by question."""
        parts = split([self._item(entry) for entry in self.dataset], eval_prompts, "{prompt}")
        self.duplicates = parts.duplicates
        return parts.train, parts.held_out

    def _item(self, entry: dict[str, Any]) -> Item:
        answer = entry["answer"]
        columns = {"entry": entry, "task": self.task}
        return Item(entry["question"], None if answer is None else str(answer), columns)


def _create(task: str, task_config: dict[str, Any], size: int, seed: int) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UsageError("data=reasoning_gym needs reasoning-gym: pip install reasoning-gym") from None
    if task not in DATASETS:
        close = difflib.get_close_matches(str(task), DATASETS, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are: {', '.join(sorted(DATASETS))}"
        raise UsageError(f"data.task={task}: reasoning-gym has no such task; {hint}")
    known = sorted({option.name for option in fields(DATASETS[task][1])} - {"size", "seed"})
    for name in task_config:
        if name not in known:
            raise UsageError(f"data.task_config.{name} is no option of the task {task}; there are: {', '.join(known)}")
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **task_config)
    except (AssertionError, TypeError, ValueError) as error:
        raise UsageError(f"data.task_config: the task {task} refuses its options: {error}") from error
