# make train   set up, then the quickstart under a fresh run name
# make test    set up, then lint, format check, types and tests
# make test-cluster    launching on several nodes and under SLURM, on parts that are set up here

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: train test test-slow test-cluster lint clean

train: $(READY)
	$(BIN)/python train.py experiment=quickstart

test: lint
	$(BIN)/python -m pytest -n auto --maxprocesses=4 --dist loadfile

test-slow: lint
	$(BIN)/python -m pytest -n auto --maxprocesses=4 --dist loadfile -m "not gpu and not cluster"

# Needs root, iproute2, and Debian's slurm-wlm and munge; tests that lack theirs say so and are skipped.
test-cluster: $(READY)
	$(BIN)/python -m pytest tests/cluster -m cluster -v -rs

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The editable install sees every change of the code; only its inputs make it run again.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV)
