# Every target sets up what it needs; everything lands in .venv and .cache. What is in an environment:
# requirements/NAME.in and NAME.txt; how it is built: requirements/install.py.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
# `make test VLLM=0.32.0`: an engine of another version, in an environment of its own.
VLLM ?=
# `make test VERL=DIR VLLM=0.29.0`: a checkout of verl in an environment of its own, with that vLLM.
VERL ?=
# `make test-long UNI_AGENT=DIR`: a checkout of verl's uni-agent, without its submodule of verl. EXAMPLES="DIR ...":
# folders with launch scripts of verl and verl-recipe.
UNI_AGENT ?=
EXAMPLES ?=
export EXAMPLES
# `cpu` or `cuda`; by default cuda where a GPU is.
ENGINE ?= $(if $(filter GPU,$(shell nvidia-smi -L 2>/dev/null)),cuda,cpu)
MUTANT_JOBS ?= 2

# The first Python that runs (a pyenv shim may exist and fail), fits, and can build an extension module.
PYTHON ?= $(or $(shell for p in python3.12 python3.11 python3; do \
	"$$p" requirements/install.py >/dev/null 2>&1 && echo "$$p" && break; done),python3)

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

# `$(IN) NAME PROGRAM ...` builds an environment, if it is not as it should be, and runs a program in it.
IN = $(PYTHON) requirements/install.py --venv $(VENV) $(VERL:%=--verl %)
RUN = $(IN) $(or $(VLLM),$(ENGINE))
PYTEST = $(RUN) python -m pytest
TWO := --numprocesses 2 --dist loadfile
ORDERED := $(TWO) --no-loadscope-reorder # as tests/conftest.py orders them
SLOW = -m 'slow and not training' $(ORDERED)
# Exit code 5: TEST_ARGS chose none of them.
SOME = || [ $$? = 5 ]
# vLLM's `suffix` runs on this: C++20, built with the torch that is there. Where that fails, its tests are skipped.
SUFFIX = -$(RUN) uv pip install --quiet --no-deps --no-build-isolation --python python arctic-inference==0.1.1
# All but what needs verl or what comes with it: a further one of these fails at its import.
ENGINE_TESTS := tests/engine $(patsubst %,--ignore tests/engine/test_%.py,certify parallel storm verl_server)
# What needs verl, and no training: by its name, and these.
VERL_TESTS := $(wildcard tests/test_verl_*.py tests/engine/test_verl_*.py lab/tests/test_verl_*.py) \
	tests/test_recipes.py tests/test_recurrent.py tests/test_logs.py tests/engine/test_storm.py \
	lab/tests/test_checkpoint_engine.py
versions = $(shell $(PYTHON) requirements/install.py --list $(1))
ASCENDS = $(call versions,ASCENDS)

.PHONY: help demo recording test test-fast test-long test-ascend check format asan mutants docs dev packages \
	lock cuda-imports clean

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 13

demo: ## serve with drafts off and on in turns, and train twice with verl (DEMO_ARGS=--quick)
	$(RUN) rollout-spec-lab demo $(DEMO_ARGS)

recording: ## the same, recorded as text: docs/demo.cast
	COLUMNS=100 $(RUN) uv tool run asciinema==2.4.0 rec --overwrite --cols 100 --rows 40 --idle-time-limit 1 \
		--command "rollout-spec-lab demo $(DEMO_ARGS) 2>&1 | cat" docs/demo.cast
	sed -i 's|$(CURDIR)/||g' docs/demo.cast

test: ## run the test suite (TEST_ARGS='-k name'; VLLM=0.32.0: on that vLLM; VERL=DIR: on that verl)
ifneq ($(VERL),)
	$(PYTEST) -m 'not long' $(TWO) $(VERL_TESTS) $(TEST_ARGS)
else ifneq ($(VLLM),)
	$(PYTEST) $(SLOW) $(ENGINE_TESTS) $(TEST_ARGS)
else
	$(SUFFIX)
	@# A training takes half of the memory, and one process after the other: tests without engines run beside it.
	@# The second part runs after a red first one too, and the whole is red then.
	first=0; { $(PYTEST) -m 'not long and (training or not slow)' $(ORDERED) $(TEST_ARGS) $(SOME); } || first=$$?; \
	$(PYTEST) $(SLOW) $(TEST_ARGS) $(SOME); exit $$first
endif

test-fast: ## run the tests that start no engine and train nothing
	$(SUFFIX)
	$(PYTEST) -m 'not slow and not long' $(TWO) $(TEST_ARGS)

test-long: ## train in verl's asynchronous modes, have faults, try new examples (UNI_AGENT=DIR: with its agents; VLLM=)
ifneq ($(VLLM),)
	$(PYTEST) -m long $(TWO) $(ENGINE_TESTS) $(TEST_ARGS)
else
	$(UNI_AGENT:%=PYTHONPATH=%) $(UNI_AGENT:%=UNI_AGENT=%) $(PYTEST) -m long $(TEST_ARGS) $(SOME)
	@# Without TEST_ARGS, examples that no run has had before, and the engine tests on a vLLM without a wheel for CPUs.
	$(if $(TEST_ARGS),,$(PYTEST) --hypothesis-profile default tests/test_index_oracle.py)
	$(if $(TEST_ARGS),,$(foreach v,$(call versions,NEWER),$(MAKE) test test-long VLLM=$(v) &&) true)
endif

test-ascend: dev ## run our drafter in the published vllm-ascend, with a stub of torch_npu
	$(foreach v,$(ASCENDS),$(IN) ascend-$(v) python -m pytest tests/ascend lab/tests/ascend $(TEST_ARGS) &&) true

check: ## format, lint, types, C warnings as errors
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	$(RUN) make -s -C native lint BUILD=$(CURDIR)/build/native

format: ## format the Python code and sort its imports
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

asan: ## native tests under AddressSanitizer and UBSan
	$(RUN) make -s -C native asan BUILD=$(CURDIR)/build/native

mutants: dev ## break the code in small ways: do tests see it? (MUTANTS="FILE ... native", MUTANT_JOBS=2)
	$(IN) mutants
	$(RUN) python -m rollout_spec_lab.studies.mutants --jobs $(MUTANT_JOBS) $(MUTANTS)

docs: ## build the documentation into build/site
	NO_MKDOCS_2_WARNING=1 $(IN) docs python -m mkdocs --quiet build --strict

dev: ## set up .venv
	$(RUN)

packages: # without this checkout, which only one may build at a time
	$(IN) --packages-only $(or $(VLLM),$(ENGINE))

lock: ## write requirements/NAME.txt anew, after an edit of a NAME.in (LOCK_ARGS=--upgrade: newest versions)
	$(IN) docs requirements/lock.sh $(LOCK_ARGS)

# As far as that goes without a driver: vLLM's own kernels do not load.
cuda-imports: ## see, without a GPU, that all modules import with the CUDA engine (.venv/cuda, 11 GB)
	$(MAKE) dev VENV=$(VENV)/cuda ENGINE=cuda
	$(VENV)/cuda/bin/python -W ignore tests/imports.py
	$(VENV)/cuda/bin/python -m pytest -q tests/test_device_waits.py

clean: ## remove everything that was built or downloaded
	rm -rf $(VENV) .cache build dist *.egg-info lab/*.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	rm -f rollout_spec/drafting/_native.*.so rollout_spec/drafting/_native.c
