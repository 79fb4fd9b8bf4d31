"""TRL's side of scripts/bench_vs_trl.py: its GRPOTrainer with imposed completion lengths, taking its steps in turns.

Run as a child, with its settings as JSON and the number of the pipe.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from scripts.bench_common import Child, Turns
from scripts.bench_ours import reward


class ImposedLengths(LogitsProcessor):
    """Bans the end of sequence before a row's length and forces it there.

    Args:
        lengths: int [N] of the rows. width: tokens of the (padded) prompts. eos: every id that ends a completion.
    """

    def __init__(self, lengths: Tensor, width: int, eos: Tensor) -> None:
        self.lengths, self.width, self.eos = lengths, width, eos

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        last = self.lengths == input_ids.shape[1] - self.width + 1
        scores[:, self.eos] = -torch.inf
        scores[last] = -torch.inf
        scores[last, self.eos[0]] = 0.0
        return scores


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that counts the seconds of its phases and remembers the lengths of its completions."""

    lengths: list[int]
    prompts: list[int]

    def __init__(self, imposed: list[list[int]], **options: Any) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        super().__init__(**options)
        self.imposed = [torch.tensor(some) for some in imposed]
        model: Any = self.model
        model.generate = partial(self._generate_imposed, model.generate)
        self.accelerator.backward = self._timed("backward", self.accelerator.backward)

    @contextmanager
    def _clock(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - started

    def _timed(self, phase: str, call: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._clock(phase):
                return call(*args, **kwargs)

        return timed

    def _generate_imposed(self, generate: Any, **inputs: Any) -> Tensor:
        lengths = self.imposed[min(self.state.global_step, len(self.imposed) - 1)]
        impose = ImposedLengths(lengths, inputs["input_ids"].shape[1], torch.tensor(self.eos_token_ids))
        return generate(**inputs, logits_processor=LogitsProcessorList([impose]))

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        with self._clock("generate"):
            completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self.lengths, self.prompts = [len(ids) for ids in completion_ids], [len(ids) for ids in prompt_ids]
        return completion_ids, logprobs

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with self._clock("rollout"):
            return super()._generate_and_score_completions(inputs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        # Without gradient it is the reference pass: with one update per rollout there is none of the old policy.
        with self._clock("forward" if torch.is_grad_enabled() else "reference"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def phases(self, step: float, before: dict[str, float]) -> dict[str, float]:
        """Seconds of a step's phases, named as ours are, and of the parts of its update."""
        took = {name: self.seconds[name] - before.get(name, 0.0) for name in [*self.seconds, "generate", "rollout"]}
        rollout = took.pop("rollout")
        return {**took, "score": rollout - took["generate"], "update": step - rollout}


class TurnsCallback(TrainerCallback):
    """A step is everything from the end of one optimiser step to the end of the next."""

    trainer: TimedTrainer

    def __init__(self, pipe: int) -> None:
        self.turns = Turns(pipe)
        self._before: dict[str, float] = {}
        self._started = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.turns.begin()
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        trainer = self.trainer
        phases = trainer.phases(time.perf_counter() - self._started, self._before)
        self.turns.end_step(phases=phases, lengths=trainer.lengths, prompts=trainer.prompts)
        self._before, self._started = dict(trainer.seconds), time.perf_counter()


def config(settings: dict[str, Any]) -> GRPOConfig:
    """TRL's settings for the work that ours has: GRPO's loss, one update per rollout, everything in float32.

    settings: folder, rows (in a micro-batch), imposed (lengths of each rollout), group_size, beta, lr.
    """
    total = len(settings["imposed"][0])
    return GRPOConfig(
        output_dir=str(Path(settings["folder"]) / "trl"),
        per_device_train_batch_size=settings["rows"],
        gradient_accumulation_steps=total // settings["rows"],
        num_generations=settings["group_size"],
        max_completion_length=max(map(max, settings["imposed"])),
        max_steps=len(settings["imposed"]),
        num_iterations=1,
        beta=settings["beta"],
        temperature=1.0,
        loss_type="grpo",
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        disable_dropout=True,
        use_vllm=False,
        model_init_kwargs={"dtype": "float32"},
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main(settings: dict[str, Any], pipe: int) -> None:
    lines = (Path(settings["folder"]) / "train.jsonl").read_text().splitlines()
    texts = [json.loads(line)["prompt"] for line in lines]
    prompts = [[{"role": "user", "content": text}] if settings["chat"] else text for text in texts]
    callback = TurnsCallback(pipe)
    callback.trainer = TimedTrainer(
        imposed=settings["imposed"],
        model=settings["path"],
        reward_funcs=reward,
        args=config(settings),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        callbacks=[callback],
    )
    callback.trainer.train()


def start(name: str, settings: dict[str, Any], threads: int) -> Child:
    """TRL's trainer as a child that takes a step when it is asked to; settings: of `config`, with path and chat."""
    return Child(name, [sys.executable, str(Path(__file__)), json.dumps(settings), ""], threads)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
