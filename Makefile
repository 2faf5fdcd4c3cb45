# make train   set up, then the quickstart under a fresh run name
# make test    set up, then lint, format check, types and tests
# make gpu-wheels gpu-data    what benchmarks/gpu.py wants of a machine that nothing can be fetched on
# make test-cluster    launching on several nodes and under SLURM, on parts that are set up here

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: train test test-slow test-cluster gpu-wheels gpu-data lint clean

train: $(READY)
	$(BIN)/python train.py experiment=quickstart

test: lint
	$(BIN)/python -m pytest -n auto --maxprocesses=4 --dist loadfile

test-slow: lint
	$(BIN)/python -m pytest -n auto --maxprocesses=4 --dist loadfile -m "not gpu and not cluster"

# Needs root, iproute2, and Debian's slurm-wlm and munge; tests that lack theirs say so and are skipped.
test-cluster: $(READY)
	$(BIN)/python -m pytest tests/cluster -m cluster -v -rs

# For Python 3.12 on x86-64 Linux with torch, transformers and pytest: what is missing beside them.
GPU_PACKAGES := hydra-core omegaconf torchdata zstandard pytest-timeout pytest-xdist execnet
PLATFORMS := $(foreach n,28 17,--platform manylinux_2_$(n)_x86_64) --platform manylinux2014_x86_64

gpu-wheels:
	rm -rf wheels
	$(PYTHON) -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: -d wheels \
		--python-version 3.12 --implementation cp $(PLATFORMS) \
		$(foreach package,$(GPU_PACKAGES),$(shell grep '^$(package)==' constraints.txt))
	$(PYTHON) -m pip wheel -q --disable-pip-version-check --no-deps -w wheels \
		$(shell grep '^antlr4-python3-runtime==' constraints.txt)
	du -ch wheels/*

gpu-data: $(READY)
	$(BIN)/python benchmarks/harness/corpus.py

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
