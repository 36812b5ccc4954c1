# `make demo` and `make test` do all set-up themselves; everything lands in .venv and .cache.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
UV_VERSION := 0.13.8
ENGINE ?= $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo cuda || echo cpu)
DEMO_ARGS ?=
TEST_ARGS ?=

# The first Python that runs (a pyenv shim may exist and fail), fits, and can build an extension module.
FITS := import ensurepip, os, sys, sysconfig; sys.exit(not ((3, 11) <= sys.version_info < (3, 13) \
	and os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))))
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do \
	"$$p" -c '$(FITS)' >/dev/null 2>&1 && echo "$$p" && break; done)

# Nothing is written outside the checkout; a cache that the user has chosen stays in use.
export XDG_CACHE_HOME := $(CURDIR)/.cache
export MPLCONFIGDIR := $(CURDIR)/.cache/matplotlib
export VLLM_CONFIG_ROOT := $(CURDIR)/.cache/vllm-config
export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/.cache/torchinductor
export TRITON_HOME := $(CURDIR)/.cache/triton
export WANDB_CONFIG_DIR := $(CURDIR)/.cache/wandb
export UV_CACHE_DIR ?= $(CURDIR)/.cache/uv
# Without byte code every Ray worker would compile all its imports again.
unexport PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME VIRTUAL_ENV

BIN := $(VENV)/bin
UV := $(BIN)/uv
PYTEST := $(BIN)/python -m pytest --numprocesses 2
# Exit code 5: TEST_ARGS chose none of them.
FAST = $(PYTEST) -m 'not slow' --dist loadfile $(TEST_ARGS) || [ $$? = 5 ]
NATIVE := $(MAKE) --no-print-directory -C native BUILD=$(CURDIR)/build/native
INSTALLED := $(VENV)/.installed-$(ENGINE)
BUILT := $(VENV)/.built
SUFFIX := $(VENV)/.suffix-$(ENGINE)
# What the editable install is made from; other Python and YAML edits take effect by themselves.
SOURCES := pyproject.toml setup.py $(wildcard native/*.c native/*.h native/*.py)

.PHONY: help demo test test-fast check format asan bench docs dev lock clean

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: dev ## train twice with verl, speculation off and on, and report (DEMO_ARGS=--quick)
	$(BIN)/rollout-spec demo $(DEMO_ARGS)

test: dev $(SUFFIX) ## run the test suite (TEST_ARGS='-k name')
	$(FAST)
	$(PYTEST) -m slow --dist loadgroup --no-loadscope-reorder $(TEST_ARGS) || [ $$? = 5 ]

test-fast: dev $(SUFFIX) ## run the tests that start no engine and train nothing
	$(FAST)

check: dev ## format, lint, types, C warnings as errors
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(NATIVE) lint

format: dev ## format the Python code and sort its imports
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

asan: dev ## native tests under AddressSanitizer and UBSan
	$(NATIVE) asan

bench: dev ## time the native core
	$(BIN)/rollout-spec bench native

docs: $(VENV)/docs/.installed ## build the documentation into build/site
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/python -m mkdocs --quiet build --strict

dev: $(BUILT) ## set up .venv

$(BUILT): $(INSTALLED) $(SOURCES)
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

# The lock names every package, so nothing is resolved here and no other version can come in.
$(INSTALLED): requirements/$(ENGINE).txt | $(UV)
	@echo "Installing the $(ENGINE) engine into $(VENV); the first time this downloads several GB."
	$(UV) pip install --python $(BIN)/python --no-deps --compile-bytecode -r $<
	@rm -f $(VENV)/.installed-* && touch $@

# What vLLM's `suffix` runs on, for the tests that compare with it: C++20, built with the torch that is here (by
# itself it would fetch another one). Without it these tests are skipped.
$(SUFFIX): $(INSTALLED)
	$(UV) pip install --quiet --python $(BIN)/python --no-deps nanobind==2.9.2 cmake ninja wheel
	PATH="$(abspath $(BIN)):$$PATH" $(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation \
		arctic-inference==0.1.1 || echo "arctic-inference cannot be built here: its tests are skipped" >&2
	@touch $@

# An environment of its own: the site needs nothing of the engine, nor the compiled module.
$(VENV)/docs/.installed: requirements/docs.txt | $(UV)
	$(UV) venv --quiet --clear --python $(BIN)/python $(VENV)/docs
	$(UV) pip install --quiet --python $(VENV)/docs/bin/python --no-deps -r $<
	@touch $@

$(UV):
	@[ -n "$(PYTHON)" ] || { echo "No Python 3.11 or 3.12 with venv and its headers (Python.h) was found." \
		"Install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c '$(FITS)' || { echo "$(PYTHON) is not a Python 3.11 or 3.12 with venv and Python.h." >&2; exit 1; }
	@command -v $${CC:-cc} >/dev/null || { echo "A C compiler is needed (cc, or set CC)." >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

NEVER := ; ([^ ]+ [^ ]+ [^ ]+ and )?(sys_platform == '(never|emscripten|win32)'|python_full_version >= '3.13')$$

lock: $(UV) ## renew requirements/{cpu,cuda,docs}.txt
	for engine in cpu cuda; do \
		{ echo "# Written by 'make lock' from $$engine.in and $$engine-overrides.txt."; \
		  $(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --no-header --no-annotate \
			--override requirements/$$engine-overrides.txt requirements/$$engine.in \
		  | grep -vE "$(NEVER)"; \
		} > requirements/$$engine.txt; \
	done
	{ echo "# Written by 'make lock' from docs.in."; \
	  $(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --no-header --no-annotate \
		requirements/docs.in; \
	} > requirements/docs.txt

clean: ## remove everything that was built or downloaded
	rm -rf $(VENV) .cache build dist outputs *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	rm -f rollout_spec/drafting/_native.*.so rollout_spec/drafting/_native.c
