"""`reward=model`: a sequence-classification reward model."""

from typing import Any

from torch import Tensor

from grpo_lightning.errors import UsageError
from grpo_lightning.reward.classifier import Classifier, in_chat, questions, use_chat
from grpo_lightning.reward.score import RewardBatch


class Model:
    """The one number that the reward model gives for the prompt with its completion, as it is.

    path, tokens, device, bf16: see Classifier.
    chat: true, false, or auto: whether the reward model's tokenizer has a chat template. With it, the model reads the
        `question` as the user's turn and the completion as the assistant's; without, the prompt and the completion.
    question: the column of the data with the question, as text or chat messages; "prompt" for the policy's prompt.

    Raises UsageError if the model cannot be loaded or does not give one number.
    """

    def __init__(
        self,
        path: str | None = None,
        chat: bool | str = "auto",
        question: str | None = None,
        tokens: int = 16384,
        device: str = "auto",
        bf16: bool = False,
        weight: float = 1.0,
        correctness: bool = False,
    ):
        self.classifier = Classifier("reward.model", "sequence", path, tokens=tokens, device=device, bf16=bf16)
        if self.classifier.config.num_labels != 1:
            raise UsageError(
                f"reward.model.path={path} has {self.classifier.config.num_labels} labels; a reward model has one"
            )
        self.chat = use_chat("reward.model", chat, question, self.classifier.tokenizer)
        self.question = question
        self.weight = weight
        self.correctness = correctness

    def __call__(self, batch: RewardBatch) -> list[Any]:
        logits = self.classifier.logits([self.classifier.ids(text, self.chat) for text in self._texts(batch)])
        return [float(row) if isinstance(row, Tensor) else row for row in logits]

    def _texts(self, batch: RewardBatch) -> list[str]:
        if self.question is None:
            return [prompt + completion for prompt, completion in zip(batch.prompts, batch.completions, strict=True)]
        asked = questions("reward.model", self.question, batch.prompts, batch.columns)
        rows = zip(asked, batch.completions, strict=True)
        return [in_chat(self.classifier.tokenizer, question, completion) for question, completion in rows]
