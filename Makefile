# make train    the main job: the embedded model learns its task (sets up .venv if needed)
# make test     the tests (likewise)
# make setup    the .venv alone: about 2 GB and 2 to 5 minutes
# make lint     ruff and mypy
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.ready
# The pinned torch is the CPU build where the index has one; on a CUDA machine install torch first (README, "Install").
ARGS ?=

.PHONY: train test setup lint clean

train: $(STAMP)
	$(RUN) train.py $(ARGS)

test: $(STAMP)
	$(RUN) -m pytest tests $(ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --constraint constraints.txt torch
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable ".[dev,hub,reasoning_gym]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache
