# Everything runs in a virtual environment beside this file; `make` alone lists what there is.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PROTOS := $(wildcard protos/*.proto)

.DEFAULT_GOAL := help
.PHONY: help setup demo test docker-test soak lint proto bench clean

help:  ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

setup: $(READY)  ## Make .venv with everything

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "dtfm needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Name another: make setup PYTHON=python3.12"; exit 1; }
	@echo "Setting up $(VENV) (once; a few minutes, mostly PyTorch) ..."
	@$(PYTHON) -m venv $(VENV) || { echo "Could not make a virtual environment. On Debian: apt-get install python3-venv"; exit 1; }
	@echo "  installing the packages in constraints.txt ..."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@echo "  compiling the scheduler (half a minute) ..."
	@$(BIN)/python -m dtfm.scheduler.warm_up > /dev/null
	@touch $@
	@echo "  done."

demo: $(READY)  ## Train a small Llama with a coordinator and four nodes on this machine
	@$(BIN)/dtfm-coordinator demo

# tests/cluster and tests/wan start many processes and depend on time, so nothing runs beside them.
test: lint  ## Lint, then all tests
	$(BIN)/python -m pytest -n 2 --durations=15 --ignore=tests/cluster --ignore=tests/wan
	$(BIN)/python -m pytest --durations=15 tests/cluster tests/wan

docker-test: $(READY)  ## Build the images of docker/ and train by compose (root; apt-get install docker.io docker-compose mmdebstrap)
	$(BIN)/python -m pytest -s --durations=5 -m docker tests/docker

soak: $(READY)  ## The long versions of tests: ten minutes of chaos, every fault at every node, every precision (20 minutes)
	$(BIN)/python -m pytest --durations=15 -m soak tests/cluster tests/wan

lint: $(READY)  ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

proto: $(READY)  ## Regenerate the stubs from protos/*.proto
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. $(PROTOS:%=dtfm/%)
	$(BIN)/python -m grpc_tools.protoc -I. --grpc_python_out=. dtfm/protos/control.proto

.PHONY: docs
docs: $(READY)  ## Regenerate docs/run-file.md from the run file's schema
	$(BIN)/python -m dtfm.coordinator.config.run_file_docs > docs/run-file.md

bench: $(READY)  ## Some of the measurements in docs/measurements.md (a quarter of an hour)
	$(BIN)/python -m tests.bench.overhead
	$(BIN)/python -m tests.bench.kernels
	$(BIN)/python -m tests.bench.scheduler

clean:  ## Remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info
