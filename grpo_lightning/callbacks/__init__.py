"""Lightning callbacks of a run."""

from grpo_lightning.callbacks.checkpoint import Checkpoint
from grpo_lightning.callbacks.completions_table import CompletionsTable
from grpo_lightning.callbacks.evaluation import EvaluationCallback
from grpo_lightning.callbacks.progress import Progress
from grpo_lightning.callbacks.recorder import Recorder
from grpo_lightning.callbacks.rollout import RolloutCallback

__all__ = ["Checkpoint", "CompletionsTable", "EvaluationCallback", "Progress", "Recorder", "RolloutCallback"]
