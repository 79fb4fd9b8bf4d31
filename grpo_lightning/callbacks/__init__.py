"""Lightning callbacks of a run."""

from grpo_lightning.callbacks.checkpoint import Checkpoint
from grpo_lightning.callbacks.completions_table import CompletionsTable
from grpo_lightning.callbacks.evaluation import EvaluationCallback
from grpo_lightning.callbacks.progress import Progress
from grpo_lightning.callbacks.recorder import Recorder
from grpo_lightning.callbacks.rollout import RolloutCallback
from grpo_lightning.callbacks.sampler_check import SamplerCheck

__all__ = [
    "Checkpoint", "CompletionsTable", "EvaluationCallback", "Progress", "Recorder", "RolloutCallback", "SamplerCheck",
]  # fmt: skip
