"""`reward=reasoning_gym`: the task's own scorer, for data=reasoning_gym."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from grpo_lightning.errors import UsageError
from grpo_lightning.reward.answer import marked_answers, visible
from grpo_lightning.reward.score import RewardBatch


@dataclass(frozen=True)
class ReasoningGymScore:
    r"""1 where the task's scorer gives its full score, else 0.

    partial_credit: the scorer's own number from 0 to 1 instead. Many tasks pay something for any answer of the right
    form, or for one that contains the right one, which can be learnt instead of the task. Only 1 counts as correct.

    What is scored is the last marked answer (`<answer>...</answer>`, `\boxed{}`, `####`, "the answer is"), without
    one all that was written, after `</think>` if there is thinking.
    """

    partial_credit: bool = False
    weight: float = 1.0
    correctness: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.partial_credit, bool):
            raise UsageError(f"reward.reasoning_gym.partial_credit must be true or false, got {self.partial_credit!r}")

    def __call__(self, batch: RewardBatch) -> list[float | None]:
        entries = batch.columns.get("entry")
        if entries is None:
            raise UsageError("reward=reasoning_gym scores only data=reasoning_gym; choose another reward for this data")
        rows = zip(batch.prompts, batch.completions, entries, strict=True)
        scores = [_score(visible(prompt, completion), entry) for prompt, completion, entry in rows]
        return [score if self.partial_credit else float(score >= 1) for score in scores]


def _score(text: str | None, entry: dict[str, Any]) -> float:
    if text is None:
        return 0.0
    mark = next(marked_answers(text), None)
    answer = text.strip() if mark is None else mark.text
    if mark is not None and mark.kind in ("hash", "phrase"):
        answer = answer.rstrip(".")
    return float(_scorer(entry["metadata"]["source_dataset"])(answer, entry))


@lru_cache
def _scorer(task: str) -> Any:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(task)
