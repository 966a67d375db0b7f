# `make demo` and `make test` work on a fresh machine; `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-newest newest test-serving test-transformers test-outsider lint docs clean

# The first Python >= 3.11; one that already has torch lends it to the environment.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
NEWEST := .venv-newest
ENVIRONMENT := $(PYTHON) tools/environment.py
REPORT := reports/demo
DEMO_ARGS ?=
PYTEST_ARGS ?=
AOT_TESTS := $(filter-out %cdna4/test_config.py %cdna4/test_layout.py,$(shell \
	find tests -name "test_*_aot.py" -o -name "test_*.py" -path "*cdna4*" | sort)) \
	tests/testing/test_ahead_of_time.py tests/gfx950/test_ratchet.py

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):[^#]*## */make \1\t/' | expand -t 20

# Only a change of the requirements installs again: the package itself is editable.
$(VENV)/.installed: pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then echo "make: python — need Python 3.11 or newer on PATH, got none;" \
		"install it or run make PYTHON=/path/to/python3.12" >&2; exit 2; fi
	@$(ENVIRONMENT) install $(VENV) plot transformers
	@touch $@

$(VENV)/.tested: $(VENV)/.installed gfx950-emulator/pyproject.toml
	@$(ENVIRONMENT) install $(VENV) test
	@touch $@

demo: $(VENV)/.installed  ## install, run the MoE layers of a gpt-oss checkpoint on the best backend, check every number
	@$(BIN)/mxpert demo --output $(REPORT) $(DEMO_ARGS) </dev/null

lint: $(VENV)/.tested  ## ruff (rules and format), mypy and the import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo >/dev/null || $(BIN)/lint-imports --no-logo

test: lint  ## install the test extra, lint, run the whole suite; the last line is pytest's
	@$(BIN)/python tests/run_suite.py $(PYTEST_ARGS) </dev/null

# What a change breaks first: formats, routing, reference, checks, training, documents; then the
# logic of the quantisation kernels. No kernel is compiled.
FAST_TESTS := $(addprefix tests/,formats routing training \
	core/test_launch.py core/test_ambient.py core/test_registry_backends.py \
	grouped/test_op.py grouped/test_reference.py moe/test_checks.py moe/test_reference.py \
	moe/test_weights.py moe/triton/test_config.py testing rigs \
	test_architecture.py test_docs.py test_packaging.py test_public_arguments.py test_site.py)
# Of these, what compiles, trains or starts processes.
FAST_SKIPS := not compile and not toy_lm and not code_blocks and not figures and not fsdp2 \
	and not ranks
FAST_PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal $(PYTEST_ARGS)

test-fast: $(VENV)/.tested  ## ruff and the quick tests, below 90 s on 2 cores
	@$(BIN)/ruff check .
	@$(FAST_PYTEST) -k '$(FAST_SKIPS)' $(FAST_TESTS) </dev/null
	@TRITON_INTERPRET=1 $(FAST_PYTEST) tests/conformance/test_quantize.py </dev/null

DOCS_VENV := .venv-docs

$(DOCS_VENV)/.installed: docs/requirements.txt
	@$(or $(PYTHON),python3) tools/environment.py requirements $(DOCS_VENV) $<
	@touch $@

docs: $(DOCS_VENV)/.installed  ## build the documentation site strictly into build/site
	@PATH="$(DOCS_VENV)/bin:$$PATH" NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet

# Torch and tools of the ordinary environment, and the newest Triton that pyproject.toml admits.
$(NEWEST)/.installed: $(VENV)/.tested
	@$(ENVIRONMENT) newest $(NEWEST) $(VENV)
	@touch $@

newest: $(NEWEST)/.installed

test-newest: newest  ## compile every kernel on the newest supported Triton, execute those of gfx950
	@$(NEWEST)/bin/python -c 'import triton; print("Triton", triton.__version__)'
	@PYTHONDONTWRITEBYTECODE= $(NEWEST)/bin/python -m pytest --color=no -n "$$(nproc)" --dist worksteal $(AOT_TESTS) \
		-m "not epilogues" $(PYTEST_ARGS) </dev/null

test-serving:  ## a tiny gpt-oss through vLLM on a CPU, layers of SGLang; environment of its own (4 GB)
	@$(PYTHON) tests/integrations/serving/run.py $(PYTEST_ARGS) </dev/null

test-transformers: $(VENV)/.tested  ## tests of Transformers models on the oldest and the newest release, which the index has today
	@$(BIN)/python tests/integrations/run_versions.py $(PYTEST_ARGS) </dev/null

test-outsider:  ## the wheel as a user gets it: newest versions, ordinary index, outside of the checkout
	@$(PYTHON) tests/outsider/run.py

clean:  ## remove the environment, caches and reports
	@rm -rf $(VENV) $(DOCS_VENV) $(NEWEST) .venv-serving .venv-transformers build dist reports .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
