"""`reward=process_model`: a reward model that gives a score at the end of every step."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from grpo_lightning.errors import UsageError
from grpo_lightning.reward.classifier import Classifier, in_chat, questions, use_chat
from grpo_lightning.reward.process import Steps
from grpo_lightning.reward.score import RewardBatch, Step, Unscored, mean_rewards


class ProcessModel:
    """A step's score is the probability of `label` at its end; of a model with a single label its number as it is.

    head: "token", a token classifier that reads the whole completion once, or "sequence", a sequence classifier that
        reads the completion up to the end of each step.
    delimiter, split: where steps end, see Steps; without either, behind blank lines.
    separator: text put behind every step for the model, at whose last token a token classifier is read off
        ("<extra_0>" for some models, "\\n" for others); null: the last token of the step.
    path, tokens, device, bf16: see Classifier. chat, question: see Model.

    Raises UsageError if the model cannot be loaded or has no such label.
    """

    def __init__(
        self,
        path: str | None = None,
        head: str = "token",
        label: int = 1,
        delimiter: str | None = None,
        split: str | Callable[[str], list[int]] | None = None,
        separator: str | None = None,
        chat: bool | str = "auto",
        question: str | None = None,
        tokens: int = 16384,
        device: str = "auto",
        bf16: bool = False,
        weight: float = 1.0,
        correctness: bool = False,
    ):
        option = "reward.process_model"
        if head not in ("token", "sequence"):
            raise UsageError(f"{option}.head must be token or sequence, got {head!r}")
        self.cut = Steps(delimiter, split, option, default=r"\n\n")
        self.classifier = Classifier(option, head, path, tokens=tokens, device=device, bf16=bf16)
        labels = self.classifier.config.num_labels
        if labels > 1 and not 0 <= label < labels:
            raise UsageError(f"{option}.label must be from 0 to {labels - 1} for {path}, got {label!r}")
        if head == "token" and not self.classifier.tokenizer.is_fast:
            raise UsageError(f"{option}.path={path}: its tokenizer does not tell where a token stands in the text")
        self.chat = use_chat(option, chat, question, self.classifier.tokenizer)
        self.head, self.label, self.separator, self.question = head, label, separator or "", question
        self.weight = weight
        self.correctness = correctness

    def __call__(self, batch: RewardBatch) -> list[float | None]:
        return mean_rewards([row if isinstance(row, list) else None for row in self.steps(batch)])

    def steps(self, batch: RewardBatch) -> list[Any]:
        if self.question is None:
            asked: list[Any] = batch.prompts
        else:
            asked = questions("reward.process_model", self.question, batch.prompts, batch.columns)
        ends = [self.cut.ends(completion) for completion in batch.completions]
        read = self._by_token if self.head == "token" else self._by_sequence
        scores = iter(read(asked, batch.completions, ends))
        rows = [[(end, next(scores)) for end in row] for row in ends]
        return [
            next((score for _, score in row if isinstance(score, Unscored)), [Step(end, score) for end, score in row])
            for row in rows
        ]

    def _text(self, question: Any, completion: str) -> str:
        return in_chat(self.classifier.tokenizer, question, completion) if self.chat else question + completion

    def _by_sequence(self, asked: list[Any], completions: list[str], ends: list[list[int]]) -> list[Any]:
        """One score per step of all rows: the texts up to each end, all batched together."""
        texts = [
            self._text(question, self._marked(completion, row[: j + 1])[0])
            for question, completion, row in zip(asked, completions, ends, strict=True)
            for j in range(len(row))
        ]
        logits = self.classifier.logits([self.classifier.ids(text, self.chat) for text in texts])
        return [self._score(row) if isinstance(row, Tensor) else row for row in logits]

    def _by_token(self, asked: list[Any], completions: list[str], ends: list[list[int]]) -> list[Any]:
        ids: list[list[int]] = []
        places: list[list[int]] = []
        for question, completion, row in zip(asked, completions, ends, strict=True):
            marked, marks = self._marked(completion, row)
            text = self._text(question, marked)
            begin, stop = _place(marked, text)
            tokens, starts = self.classifier.ids_and_starts(text, self.chat)
            ids.append(tokens if row else [])
            places.append(
                [max(i for i, at in enumerate(starts) if 0 <= at < min(begin + mark, stop)) for mark in marks]
            )
        scores: list[Any] = []
        for logits, row in zip(self.classifier.logits(ids), places, strict=True):
            scores += [self._score(logits[i]) if isinstance(logits, Tensor) else logits for i in row]
        return scores

    def _marked(self, completion: str, ends: list[int]) -> tuple[str, list[int]]:
        """The steps with the separator behind each, and the positions behind the separators."""
        text, marks = "", []
        for start, end in zip([0, *ends], ends, strict=False):
            text += completion[start:end] + self.separator
            marks.append(len(text))
        return text, marks

    def _score(self, logits: Tensor) -> float:
        return float(logits if len(logits) == 1 else logits.softmax(-1)[self.label])


def _place(part: str, text: str) -> tuple[int, int]:
    """Where the part begins and ends in the text, which may have it stripped, as chat templates do with a turn."""
    begin = text.rfind(part)
    if begin >= 0:
        return begin, begin + len(part)
    begin = text.rfind(part.strip())
    if begin < 0:
        raise ValueError("the reward model's chat template leaves out a part of the completion")
    return begin - (len(part) - len(part.lstrip())), begin + len(part.strip())
