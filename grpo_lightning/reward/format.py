"""`reward=format`: 1 if the whole completion matches a regular expression, else 0."""

import re
from dataclasses import dataclass

from grpo_lightning.errors import UsageError
from grpo_lightning.reward.answer import spoken
from grpo_lightning.reward.score import RewardBatch


@dataclass(frozen=True)
class Format:
    """Full match, and a dot matches line ends too. A `<think>` at the end of the prompt counts as the completion's.

    Raises UsageError if the pattern is not a regular expression.
    """

    pattern: str
    weight: float = 1.0
    correctness: bool = False

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern, re.DOTALL)
        except (re.error, TypeError) as error:
            raise UsageError(f"reward.format.pattern {self.pattern!r} is no regular expression: {error}") from None

    def __call__(self, batch: RewardBatch) -> list[float | None]:
        pattern = re.compile(self.pattern, re.DOTALL)
        rows = zip(batch.prompts, batch.completions, strict=True)
        return [float(pattern.fullmatch(spoken(prompt, completion)) is not None) for prompt, completion in rows]
