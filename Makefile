# Every target sets up what it needs; `make help` lists the targets. ARGS is passed to the program.
# From another directory: make -C PATH TARGET. Paths are relative, so PATH may contain spaces.
MAKEFLAGS += --no-print-directory
SHELL := bash
# The lane: current packages, on the newest of CPython 3.11 to 3.13 that there is or on PYTHON=3.12; or
# Launchpad, Courier and Reverb, which exist for CPython 3.10 only.
LANE := current
PYTHON :=
ifeq ($(LANE),launchpad)
VENV := .venv-launchpad
VERSION := 3.10
else ifeq ($(LANE),current)
VENV := .venv$(addprefix -,$(PYTHON))
VERSION := $(or $(PYTHON),newest)
else
$(error LANE must be current or launchpad; got $(LANE))
endif
BIN := $(VENV)/bin
ARGS ?=
# One test process for each core, at most four: each takes up to 3 GB. ARGS="-n 0" uses none.
PARALLEL := -n logical --maxprocesses 4
INPUTS := pyproject.toml requirements.lock .ci/bootstrap
# What pytest exits with if it has no tests to run, as when ARGS names tests of the other lane.
NO_TESTS := 5
# Which tests a lane runs: all of them in that of Launchpad.
ifeq ($(LANE),launchpad)
OF_LANE :=
else
OF_LANE := and not launchpad
endif

.PHONY: help venv train test test-launchpad test-slow test-chosen check coverage notebooks api docs format bench \
  gpu-check doctor lock clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | \
	  while IFS=$$'\t' read -r name what; do printf '  make %-16s %s\n' "$$name" "$$what"; done

venv: $(VENV)/.ready  ## set up .venv (LANE=launchpad: CPython 3.10 with Launchpad, in .venv-launchpad)

$(VENV)/.ready: $(INPUTS)
	@bash .ci/bootstrap $(VERSION) $(VENV)

train: venv  ## train PPO on CartPole-v1 to a greedy return of 475 or more (ARGS="--seed 2")
	@$(BIN)/rlstack train cartpole-ppo $(ARGS)

test: venv  ## run the quick tests, and those of Launchpad and Reverb where there is CPython 3.10
	@status=0; $(BIN)/python -m pytest -o cache_dir=.pytest_cache/$(LANE)$(addprefix -,$(PYTHON)) $(PARALLEL) -m "not slow $(OF_LANE)" $(ARGS) || \
	  [ $$? = $(NO_TESTS) ] || status=1; \
	$(if $(filter current,$(LANE)),$(if $(PYTHON),,$(MAKE) test-launchpad ARGS='$(ARGS)' || status=1;)) \
	exit $$status

test-launchpad:  ## run the quick tests that need Launchpad, Courier or Reverb
	@bash .ci/bootstrap --is-possible 3.10 || { echo "There is no CPython 3.10 here, and none could be had:" \
	  "the tests of Launchpad, Courier and Reverb are left out."; exit 0; }; \
	$(MAKE) venv LANE=launchpad && { .venv-launchpad/bin/python -m pytest -o cache_dir=.pytest_cache/launchpad-only \
	  $(PARALLEL) -m "not slow and launchpad" $(ARGS) || [ $$? = $(NO_TESTS) ]; }

test-slow: venv  ## run the tests that take minutes each
	@$(BIN)/python -m pytest -m "slow $(OF_LANE)" $(ARGS)

test-chosen: venv  ## run the slow tests that continuous integration runs too
	@$(BIN)/python -m pytest -o cache_dir=.pytest_cache/chosen-$(LANE) $(PARALLEL) \
	  -m "slow and chosen $(if $(filter launchpad,$(LANE)),and launchpad,and not launchpad)" $(ARGS)

check: venv  ## check formatting, lint, types and the project's own laws
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -p no:cacheprovider tests/test_laws.py

coverage: venv  ## measure which lines the quick tests run, in all processes; pages in htmlcov/
	@$(BIN)/python -m coverage erase
	@$(BIN)/python -m coverage run -m pytest $(PARALLEL) $(ARGS); status=$$?; \
	  $(BIN)/python -m coverage combine --quiet && $(BIN)/python -m coverage html --quiet && \
	  $(BIN)/python -m coverage report --skip-covered && exit $$status

notebooks: venv  ## run the notebooks of the documentation, and store their outputs
	@$(BIN)/python -m tests.docs.notebooks

api: venv  ## write the API reference, docs/api.md, from the sources
	@$(BIN)/python docs/api_pages.py

docs: venv  ## build the documentation site in site/; a warning or a dead link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

format: venv  ## fix formatting and imports
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

bench: venv  ## run a benchmark (ARGS="single_process --quick")
	@$(BIN)/python -m benchmarks.$(or $(ARGS),single_process)

# On a machine without a network, PYTHON_HERE names the Python that has JAX: it needs no .venv.
gpu-check: $(if $(PYTHON_HERE),,venv)  ## check and measure JAX's default device (PYTHON_HERE=python3 takes that one)
	@$(or $(PYTHON_HERE),$(BIN)/python) -m benchmarks.accelerator $(ARGS)

doctor: venv  ## check which features work on this machine and how to enable the others
	@$(BIN)/rlstack doctor $(ARGS)

# uv writes this command into the header of requirements.lock.
lock: venv  ## update requirements.lock from pyproject.toml
	@PATH="$(CURDIR)/.tools/bin:$$PATH" uv pip compile --universal --generate-hashes \
	  --no-emit-index-url --extra dev --extra docs pyproject.toml -o requirements.lock --python-version 3.10 \
	  --quiet

clean:  ## remove environments and caches; runs/ stays
	@rm -rf .venv .venv-* .tools .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	  .coverage* build dist htmlcov site *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
