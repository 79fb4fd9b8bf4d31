"""An exported folder in the real vLLM, as a user would load it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_lightning.export import export
from tests.conftest import character_tokenizer
from tests.models import llama
from tests.test_lora import adapted

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

llm = LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64, gpu_memory_utilization=0.2)
prompts = ["1+2+3", "7+0", "44"]
outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
result = [[list(output.prompt_token_ids), list(output.outputs[0].token_ids)] for output in outputs]
print("RESULT", json.dumps(result))
"""


@pytest.mark.heavy
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_vllm_says_what_the_policy_says(tied: bool, lora: bool, tmp_path: Path) -> None:
    policy = llama(tie_word_embeddings=tied, hidden_size=64)
    policy = adapted(policy) if lora else policy
    export(policy, character_tokenizer(), tmp_path / "out")
    call = [sys.executable, "-c", SCRIPT, str(tmp_path / "out")]
    done = subprocess.run(call, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for prompt, said in json.loads(line.removeprefix("RESULT ")):
        for model in (policy, loaded):
            ids = torch.tensor([prompt + said])
            with torch.no_grad():
                best = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].argmax(-1)
            assert best.tolist() == said
