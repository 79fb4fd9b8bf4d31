"""What an exploration is made of: groups of completions, draws of groups, and the rollout."""

import math
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from grpo_lightning.data.prompts import Prompt
from grpo_lightning.rollout.buffer import Row
from grpo_lightning.rollout.engine import Completion


@dataclass
class Group:
    """All completions of one drawn prompt, scored. Kept whole from sampling to the minibatch.

    `task_rewards` [G] and `components` {name: [G]} are float64 with NaN where there was no score.
    `rollout` is the number (from 1) of the rollout it was sampled for; `weights_rollout` that of the rollout which
    trained, or trains, first on the weights that sampled it: one less where it was sampled ahead.
    `steps` are those of each row that were judged: the completion position of the last token, and the reward.
    """

    rows: list[Row]
    task_rewards: Tensor
    components: dict[str, Tensor]
    correct: list[bool | None]
    truncated: Tensor
    rollout: int
    weights_rollout: int
    steps: list[list[tuple[int, float]]]

    @property
    def pass_rate(self) -> float:
        """Share of the completions that are correct, of those with a verdict; NaN where there is none."""
        judged = [value for value in self.correct if value is not None]
        return sum(judged) / len(judged) if judged else math.nan


@dataclass
class Draw:
    """The scored groups of one draw of P prompts, with the messages of the rewards, and how long it was generated."""

    groups: list[Group]
    errors: list[str]
    seconds: float


@dataclass
class Ahead:
    """A draw for rollout `number` that is being generated while the rollout before is trained on."""

    number: int
    prompts: list[tuple[int, Prompt]]
    completions: "Future[list[list[Completion]]]"
    started: float
    ended: float | None = None

    def end(self, _: Any) -> None:
        self.ended = time.perf_counter()


@dataclass
class Rollout:
    """What one exploration gave: the groups to train on, those drawn for it, and the metrics over the latter."""

    number: int
    groups: list[Group]
    drawn: list[Group]
    metrics: dict[str, float]
    tokens_generated: int
    errors: list[str]

    @property
    def records(self) -> list[dict[str, Any]]:
        """Every completion drawn for this rollout and every one trained on in it, each once."""
        trained = {group.rows[0].group_id for group in self.groups}
        others = [group for group in self.drawn if group.rows[0].group_id not in trained]
        return [row.record for group in [*self.groups, *others] for row in group.rows]

    @property
    def rows(self) -> list[Row]:
        return [row for group in self.groups for row in group.rows]
