# Two commands matter: `make serve` and `make test`. Each does all set-up on a fresh machine; second runs start at once.

VENV ?= .venv
PY := $(VENV)/bin/python
MODEL ?=
PORT ?= 8000
HOST ?= 127.0.0.1
SEEDS ?= 2000
TICKS ?= 300
ARGS ?=
export HF_HUB_OFFLINE ?= 1

COVERAGE := .coverage.brain
COVERAGE_TESTS := tests/property tests/contract/test_connectors.py \
	$(addprefix tests/unit/,kv_core kv_events kv_offload kv_spec kv_transfer metrics offload planner sched structured_output v1)

.PHONY: help setup serve test lint tidy unit e2e sim coverage demo-offload bench clean

help:
	@echo "make serve [MODEL=path|tiny:glm5_next] [PORT=8000]  serve a model (default: SmolLM2-135M-Instruct); HOST=0.0.0.0 for all addresses,"
	@echo "                                                    ARGS='--max-model-len 2048' for more flags, VLLM_SERVER_DEV_MODE=1 for the page /cache"
	@echo "make test                                           style, types, all tests"
	@echo "make demo-offload                                   the CPU-offload round trip as a table"
	@echo "make lint tidy                                      the fast half of make test"
	@echo "make sim [SEEDS=2000] [TICKS=300]                   the deterministic simulator"
	@echo "make coverage                                       branch coverage of the brain (L2–L5), at least 95 % in each layer"
	@echo "make setup                                          only what the others do first: .venv, requirements, native ops"
	@echo "make clean                                          remove .venv and all that was built"
	@echo "make bench [ARGS='--only serving --rounds 3']       measurements as tables; of offload and serving also plots below benchmarks/results;"
	@echo "                                                    ARGS=list names them, ARGS=--quick takes the smallest sizes, ARGS=--help tells the rest"

setup:
	@bash scripts/setup.sh "$(VENV)" serve

setup-test:
	@bash scripts/setup.sh "$(VENV)" test

serve: setup
	@$(PY) scripts/serve.py --model "$(MODEL)" --host $(HOST) --port $(PORT) $(ARGS)

demo-offload: setup
	@$(PY) examples/offload_roundtrip.py $(ARGS)

test: lint tidy unit e2e

lint: setup-test
	@echo "== style and types"
	@$(VENV)/bin/ruff format --check --quiet . || { $(VENV)/bin/ruff format --check .; exit 1; }
	@$(VENV)/bin/ruff check --quiet .
	@$(PY) scripts/mypy_core.py

tidy: setup-test
	@echo "== tidy"
	@$(PY) -m pytest -q tests/tidy

# Several processes on few cores: one thread each, or OpenMP workers spin against each other.
unit: setup-test
	@echo "== unit, property, contract, integration, simulator"
	@OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile tests --ignore tests/tidy --ignore tests/e2e_cpu $(ARGS)

e2e: setup-test
	@echo "== end to end: real servers, real clients"
	@OMP_NUM_THREADS=1 $(PY) -m pytest -q tests/e2e_cpu $(ARGS)

sim: setup-test
	@OMP_NUM_THREADS=1 $(PY) -m tests.sim --seeds $(SEEDS) --ticks $(TICKS) $(ARGS)

coverage: setup-test
	@OMP_NUM_THREADS=1 COVERAGE_FILE=$(COVERAGE) $(PY) -m pytest -q -n 2 --dist loadfile --cov=vllm --cov-branch --cov-report= $(COVERAGE_TESTS)
	@COVERAGE_FILE=$(COVERAGE) $(PY) -m coverage json --quiet --include 'vllm/v1/*,vllm/distributed/*' -o $(COVERAGE).json
	@$(PY) scripts/coverage_brain.py $(COVERAGE).json

bench: setup-test
	@$(PY) benchmarks/run_all.py $(ARGS)

clean:
	rm -rf $(VENV) build vllm.egg-info vllm/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
