"""Lightning callbacks of a run."""

from grpo_lightning.callbacks.checkpoint import Checkpoint, RandomStates
from grpo_lightning.callbacks.completions_table import CompletionsTable
from grpo_lightning.callbacks.evaluation import EvaluationCallback
from grpo_lightning.callbacks.profile import Profile
from grpo_lightning.callbacks.progress import Progress
from grpo_lightning.callbacks.recorder import Recorder
from grpo_lightning.callbacks.rollout import RolloutCallback
from grpo_lightning.callbacks.sampler_check import SamplerCheck
from grpo_lightning.callbacks.stop import Stop, StopRequest

__all__ = [
    "Checkpoint", "CompletionsTable", "EvaluationCallback", "Profile", "Progress", "RandomStates", "Recorder",
    "RolloutCallback", "SamplerCheck", "Stop", "StopRequest",
]  # fmt: skip
