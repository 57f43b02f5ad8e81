# `make demo` and `make test` set everything up themselves (.venv, pinned packages); the others use what is there.
PYTHON ?= python3
BIN := .venv/bin
RUN_READY := .venv/.ready-run
DEV_READY := .venv/.ready-dev
VLLM_READY := .venv-vllm/.ready
VLLM_TESTS = $(shell grep -l vllm tests/contract/*.py tests/unit/services/rollout/*.py)
export PYTHON

.PHONY: demo test test-vllm chaos nightly lint types proto bench up down setup
.DEFAULT_GOAL := demo

$(RUN_READY): pyproject.toml scripts/setup.sh
	@scripts/setup.sh run
	@touch $@

$(DEV_READY): pyproject.toml scripts/setup.sh
	@scripts/setup.sh dev
	@touch $(RUN_READY) $@

$(VLLM_READY): pyproject.toml scripts/setup.sh
	@scripts/setup.sh vllm
	@touch $@

setup: $(DEV_READY)  ## everything a developer needs

demo: $(RUN_READY)  ## a PPO run on six services, start to end
	@$(BIN)/sextet demo

up: $(RUN_READY)  ## all services on this machine, in the background
	@$(BIN)/sextet up

down:  ## ends them
	@$(BIN)/sextet down

test: $(DEV_READY)  ## the whole suite, in a process for each core; more: make test ARGS="-n 0 -m docker"
	@$(BIN)/pytest -n logical --maxprocesses 4 --dist worksteal $(ARGS)

test-vllm: $(VLLM_READY)  ## what concerns vLLM, on the CPU, in an environment of its own (3.6 GB)
	@.venv-vllm/bin/python -m pytest -m "not gpu and not docker" $(VLLM_TESTS) $(ARGS)

chaos: $(DEV_READY)  ## kills every service at every place of a step, Redis and controllers many times
	@$(BIN)/pytest -m "chaos and slow and not nightly" $(ARGS)

nightly: $(DEV_READY)  ## 100 random kills, 1,000 steps with a kill every 20, 10,000 mutated messages to every method
	@SEXTET_CHAOS_KILLS=100 SEXTET_SOAK_STEPS=1000 $(BIN)/pytest -s -m nightly $(ARGS)
	@$(if $(ARGS),,SEXTET_CHAOS_SEEDS=1000 $(BIN)/pytest tests/unit/services/controller/test_random_failures.py)

lint: $(DEV_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/buf lint

types: $(DEV_READY)
	$(BIN)/pyright

proto: $(DEV_READY)  ## regenerates shared/gen
	$(BIN)/python scripts/generate_protos.py

bench: $(DEV_READY)
	$(BIN)/python -m bench $(ARGS)
