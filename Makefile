# Everything runs in a virtual environment beside this file; `make` alone lists what there is.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PROTOS := $(wildcard protos/*.proto)
# Tests start thousands of processes: where this is set, each would compile our sources again.
unexport PYTHONDONTWRITEBYTECODE

# Installs what pip is given, and says what it downloads and how far it is, in few lines: each package of a megabyte or more, and
# every five seconds the size of what is here so far. pip's temporary files lie in .venv, so that they count. Most modules are never
# imported: Python compiles the others as they are, once, before several processes of tests would.
define install
mkdir -p $(VENV)/tmp; set -o pipefail; \
echo "  installing $(2) ..."; \
(while sleep 5; do echo "    ... $$(du -sm $(VENV) 2> /dev/null | cut -f 1) MB so far"; done) & \
trap 'kill $$(jobs -p) 2> /dev/null' EXIT; \
TMPDIR=$(abspath $(VENV)/tmp) $(BIN)/python -u -m pip install --no-compile --progress-bar off --disable-pip-version-check -c constraints.txt $(1) 2>&1 \
  | awk '/(Downloading|Using cached) .*\([0-9.]+ [MG]B\)/ { sub(".*/", "", $$(NF - 2)); print "    " $$(NF - 2), $$(NF - 1), $$NF; fflush() } \
         /^Installing collected/ { print "    unpacking", NF - 3, "packages"; fflush() } \
         /^ *ERROR|^error:|No space left/ { print; fflush() }'
endef

.DEFAULT_GOAL := help
.PHONY: help setup demo wheel templates test test-together test-alone docker-test soak pythons lint proto bench gpu clean

help:  ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

setup: $(READY)  ## Make .venv with everything

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "dtfm needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Name another: make setup PYTHON=python3.12"; exit 1; }
	@echo "Setting up $(VENV) (once; a few minutes, mostly PyTorch) ..."
	@$(PYTHON) -m venv $(VENV) || { echo "Could not make a virtual environment. On Debian: apt-get install python3-venv"; exit 1; }
	@$(call install,-e .,what a coordinator needs)
	@echo "  compiling the scheduler and the kernels beside what follows (a minute or two) ..."
	@$(BIN)/python -c "import dtfm.kernels.adamw" & kernels=$$!; $(BIN)/python -m dtfm.scheduler.warm_up > /dev/null & scheduler=$$!; \
	{ $(call install,-e '.[dev]',PyTorch and what tests need); } && echo "  compiling what tests import ..." && \
	{ $(BIN)/python -m pytest --collect-only > /dev/null || true; } && wait $$kernels && wait $$scheduler
	@rm -rf $(VENV)/tmp; touch $@
	@echo "  done."

demo: $(READY)  ## Train a small Llama with a coordinator and four nodes on this machine
	@$(BIN)/dtfm-coordinator demo

# Built in a folder of its own: setuptools would leave build/ and dtfm.egg-info here.
PACKED := pyproject.toml README.md LICENSE constraints.txt dtfm coordinator kernels node protos scheduler
wheel:  ## Build dist/dtfm-*.whl, which installs where no clone is, and put constraints.txt beside it
	@into=$$(mktemp -d) && trap 'rm -rf $$into' EXIT && mkdir $$into/source && cp -R $(PACKED) $$into/source && \
	$(PYTHON) -m venv $$into/venv && $$into/venv/bin/pip wheel -q --disable-pip-version-check --no-deps -w dist $$into/source && cp constraints.txt dist && ls dist/dtfm-*.whl

# What `make templates` fills in: an image that you have pushed, and where pip finds dtfm on an instance that has no such image.
IMAGE :=
SOURCE :=
TEMPLATES := vast-onstart.sh runpod.json skypilot.yaml node.dstack.yml
templates:  ## The files for Vast, RunPod, SkyPilot and dstack with your image in them: make templates IMAGE=... [SOURCE=...]
	@[ -n "$(IMAGE)" ] || { echo "Which image? make templates IMAGE=YOU/dtfm-node [SOURCE=the URL of a wheel]"; exit 2; }
	@mkdir -p dist/templates && for name in $(TEMPLATES); do \
	  sed -e 's|YOUR/dtfm-node|$(IMAGE)|' -e 's|^SOURCE=.*|SOURCE=$${SOURCE:-$(SOURCE)}|' -e "s|docker/$$name|dist/templates/$$name|" \
	    docker/$$name > dist/templates/$$name || exit; echo dist/templates/$$name; done

# Many tests start processes that mostly wait for each other: three tests share two cores well. Those of tests/wan emulate links and
# measure them, so nothing runs beside them, except where links have no speed of their own.
ALONE := $(filter-out $(addprefix tests/wan/test_,discovery.py internet.py nat.py shared_nothing.py),$(wildcard tests/wan/test_*.py))
test: $(READY)  ## Lint, and all tests
	@$(MAKE) --no-print-directory test-together
	@$(MAKE) --no-print-directory -j 2 lint test-alone  # these tests mostly wait for packets

test-together: $(READY)
	$(BIN)/python -m pytest -n 3 --dist worksteal --durations=15 $(ALONE:%=--ignore=%)

test-alone: $(READY)
	$(BIN)/python -m pytest --durations=15 $(ALONE)

docker-test: $(READY)  ## Build the images of docker/ and train by compose (root; apt-get install docker.io docker-compose mmdebstrap)
	$(BIN)/python -m pytest -s --durations=5 -m docker tests/docker

soak: $(READY)  ## The long versions of tests: a million hostile messages, ten minutes of chaos, every fault at every node (two hours)
	$(BIN)/python -m pytest -n 2 --durations=15 --timeout=3600 --hypothesis-profile=thorough -m hypothesis tests/scheduler tests/kernels tests/protos tests/coordinator tests/node
	DTFM_TEST_DATABASE=postgresql $(BIN)/python -m pytest -n 2 --durations=15 tests/coordinator
	$(BIN)/python -m pytest -n 2 --durations=15 -m soak tests/scheduler tests/coordinator tests/node tests/kernels tests/attacks/test_strangers_frames.py
	$(BIN)/python -m pytest --durations=15 -m soak tests/cluster tests/attacks tests/wan tests/test_wheel.py --ignore=tests/attacks/test_strangers_frames.py
	$(MAKE) pythons

# Where PyTorch is not at hand for one of them, the coordinator still has to run on it.
NEED_TORCH := command/weights command/test_run_workload.py core/plan/test_planner_input.py core/trust/test_codecs.py
pythons:  ## The coordinator's tests, which need no PyTorch, on each newer Python that is here
	@for python in python3.12 python3.13 python3.14; do \
	  $$python -c '' 2> /dev/null || { echo "There is no $$python."; continue; }; \
	  $$python -m venv .venv-$$python && grep -v '^torch==' constraints.txt > .venv-$$python/constraints.txt && \
	  .venv-$$python/bin/python -m pip install -q -c .venv-$$python/constraints.txt -e '.[tests]' && \
	  .venv-$$python/bin/python -m pytest -n 2 --dist worksteal tests/coordinator tests/scheduler $(NEED_TORCH:%=--ignore=tests/coordinator/%) || exit; \
	done

lint: $(READY)  ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	nice $(BIN)/mypy
	nice $(BIN)/lint-imports

proto: $(READY)  ## Regenerate the stubs from protos/*.proto
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. $(PROTOS:%=dtfm/%)

.PHONY: docs
docs: $(READY)  ## Regenerate docs/run-file.md from the run file's schema
	$(BIN)/python -m tests.coordinator.config.run_file_page > docs/run-file.md

bench: $(READY)  ## Some of the measurements in docs/measurements.md (a quarter of an hour)
	$(BIN)/python -m tests.bench.overhead
	$(BIN)/python -m tests.bench.kernels
	$(BIN)/python -m tests.bench.scheduler

gpu: $(READY)  ## On a machine with a GPU: test and measure all that needs one, into one file to send in (a quarter of an hour)
	@line=$$($(BIN)/dtfm-node install-line) && sh -c "$$line"
	$(BIN)/python -m tests.bench.gpu

clean:  ## Remove .venv and caches
	rm -rf $(VENV) .venv-* .pytest_cache .mypy_cache .ruff_cache *.egg-info build dist
