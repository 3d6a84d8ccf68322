# Every verb sets up what it needs first and can be the first one run on a fresh machine that has
# Python >= 3.10, make and, for full speed, a C compiler. Repeated runs do not install again.
#
#   PYTHON=python3.12 make test      another interpreter
#   PIP_ARGS="--index-url ..."       further arguments for pip, e.g. an index with CPU builds of torch
#   TEST_ARGS="-k scheduler -x"      further arguments for pytest
#   BENCH_ARGS="--quick"             further arguments for benchmarks/serving.py (minutes instead
#                                    of about an hour)

PYTHON ?= python3
VENV ?= .venv
PEERS ?= .peers
# The pin's CPU build where an index offers one (a local version such as +cpu is the newer one to
# pip). Installed before the package, so that no other build of torch is ever considered.
TORCH ?= torch==2.13.0
PIP_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=
DEMO_ARGS ?=
FAST ?= not slow and not peer

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install $(PIP_ARGS)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-all lint format bench bench-peers clean

help: ## list the verbs
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## the virtual environment with torch, the package (editable) and the tools

demo: $(STAMP) ## the engine on a real model: answers alone and 64 at a time, compared bit by bit
	$(BIN)/tokentight demo $(DEMO_ARGS)

test: $(STAMP) ## the fast tests
	$(BIN)/pytest -m "$(FAST)" $(TEST_ARGS)

test-all: $(STAMP) ## all tests but those that need another engine
	$(BIN)/pytest -m "not peer" $(TEST_ARGS)

lint: $(STAMP) ## ruff check, ruff format --check, mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src

format: $(STAMP) ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## serving throughput and latency, with ratios against the peers that are installed
	$(BIN)/python benchmarks/serving.py --peers-directory $(PEERS) $(BENCH_ARGS)

bench-peers: $(STAMP) ## install the peers that `make bench` measures against (about 1 GB)
	$(PYTHON) benchmarks/setup_vllm.py $(PEERS)/vllm

clean: ## remove the virtual environments and caches
	rm -rf $(VENV) $(PEERS) .mypy_cache .ruff_cache .pytest_cache .hypothesis

# An interrupted run leaves no stamp, and the next one goes on where pip stopped.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: $(PYTHON) is missing or older than 3.10; name another: make PYTHON=python3.12 ..." >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $(PYTHON) cannot make virtual environments; install its venv package (Debian, Ubuntu: apt install python3-venv)" >&2; \
	  exit 1; }
	@test -x $(BIN)/python || echo "setting up $(VENV): some minutes the first time"
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) --quiet "$(TORCH)"
	$(PIP) --quiet "$(TORCH)" --editable ".[engine,dev]"
	@touch $@
