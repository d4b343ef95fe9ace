# Everything a newcomer and CI need. `make demo` and `make test` install what they use.
SHELL := /bin/bash
PYTHON ?= $(shell test -x /usr/bin/python3 && echo /usr/bin/python3 || echo python3)
BIN := .venv/bin
TESTBED := slurm/testbed/testbed
BOARD := tuneplane/board

.PHONY: board demo demo-slurm test test-here test-testbed test-alone test-fast lint contract bench testbed testbed-down install images wheel

install: .venv/installed

.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed"; exit 1; }
	@$(PYTHON) -m venv .venv || { echo "python3-venv is needed: apt-get install python3-venv"; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check --use-pep517 -e '.[dev]'
	@touch $@

# The main job on this machine: a lab, an experiment, a run, its curve and its artifacts.
demo: install
	PATH="$(CURDIR)/$(BIN):$$PATH" docs/first-run/demo.sh local

# The same on a real Slurm of four hosts with fake GPUs, in a container, on two nodes.
demo-slurm: testbed
	tar -C docs -c first-run | $(TESTBED) exec --user alice -- sh -c 'cd && rm -rf first-run && tar x'
	$(TESTBED) exec --user alice -- sh -c 'cd && exec first-run/demo.sh h200:16 --image "$$1"' sh "$$($(TESTBED) image)"

testbed: install
	$(TESTBED) up
	$(TESTBED) install-tp
	$(TESTBED) image
	$(TESTBED) status

testbed-down:
	$(TESTBED) down

# The images of tests and demo, and those of the catalog's methods, without a registry of images. What this
# machine's disk has no room for, or pip no packages, is left out and said. INDEX=https://download.pytorch.org/whl/cpu
# gives the smaller torch for nodes without GPUs; IMAGES="pytorch trl" makes these alone.
images: wheel
	$(TESTBED) image
	$(TESTBED) catalog-images dist/tuneplane-*.whl $(IMAGES) $(if $(INDEX),--index $(INDEX))

# The page of `tp board`, from its sources by Node.js and npm; nothing else of a checkout needs them.
board: $(BOARD)/static/app.js

$(BOARD)/static/app.js: $(shell find $(BOARD)/web -name node_modules -prune -o -type f -print)
	@command -v npm >/dev/null || { echo "the board's page needs Node.js 18 or newer and npm: apt-get install nodejs npm"; exit 1; }
	npm --prefix $(BOARD)/web ci --ignore-scripts --no-audit --no-fund --loglevel=error
	npm --prefix $(BOARD)/web run --silent build
	@touch $@

# What images install.
wheel: install board
	rm -rf dist
	$(BIN)/python -m build --wheel --outdir dist

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/tools/kernel_stdlib.py

contract: install
	$(BIN)/python tests/tools/contract.py

test-fast: install
	$(BIN)/pytest -q -n 3 -m "not testbed and not slow"

# Trainers that the callback is tested in: torch, transformers, TRL. For `make test` alone.
.venv/training: tests/requirements-training.txt .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --use-pep517 -r tests/requirements-training.txt
	@touch $@

# What computes runs beside what mostly waits for Slurm; each prints once it is done.
test: lint contract .venv/training
	$(BIN)/python tests/tools/system_packages.py
	$(MAKE) --no-print-directory board
	$(MAKE) --jobs=2 --output-sync test-here test-alone
	$(MAKE) test-testbed

test-here: install
	$(BIN)/pytest -q -n 2 --dist loadfile -m "not testbed"

# Chains hold a GPU for minutes, and others ask for all nodes at once: those would wait behind them.
CHAINS := tests/test_slurm_restarts.py tests/test_slurm_pause.py tests/test_slurm_endings.py

test-testbed: install
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder -m "testbed and not alone" $(CHAINS)
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder -m "testbed and not alone" $(CHAINS:%=--ignore=%)

test-alone: install
	$(BIN)/pytest -m "testbed and alone"

bench: testbed board
	$(BIN)/python tests/bench/run.py
