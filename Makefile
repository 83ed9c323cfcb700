# Every target sets up what it needs; `make help` lists the targets. ARGS is passed to the program.
# From another directory: make -C PATH TARGET. Paths are relative, so PATH may contain spaces.
MAKEFLAGS += --no-print-directory
SHELL := bash
PYTHON := 3.12
VENV := .venv
CORE := .venv-core-$(PYTHON)
BIN := $(VENV)/bin
ARGS ?=
# One test process for each core, at most four: each takes up to 3 GB. ARGS="-n 0" uses none.
PARALLEL := -n logical --maxprocesses 4
INPUTS := pyproject.toml requirements.lock .ci/bootstrap

.PHONY: help venv train test test-slow test-chosen test-chosen-core test-core check coverage notebooks docs \
  format bench gpu-check doctor lock clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | \
	  while IFS=$$'\t' read -r name what; do printf '  make %-16s %s\n' "$$name" "$$what"; done

venv: $(VENV)/.ready  ## set up the reference environment in .venv (CPython 3.10)

$(VENV)/.ready: $(INPUTS)
	@bash .ci/bootstrap 3.10 .venv

$(CORE)/.ready: $(INPUTS)
	@bash .ci/bootstrap $(PYTHON) .venv-core-$(PYTHON)

train: venv  ## train PPO on CartPole-v1 to a greedy return of 475 or more (ARGS="--seed 2")
	@$(BIN)/rlstack train cartpole-ppo $(ARGS)

test: venv  ## run the quick tests
	@$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-slow: venv  ## run the tests that take minutes each
	@$(BIN)/python -m pytest -m slow $(ARGS)

test-chosen: venv  ## run the slow tests that continuous integration runs too
	@$(BIN)/python -m pytest -o cache_dir=.pytest_cache/chosen $(PARALLEL) -m "slow and chosen" $(ARGS)

test-chosen-core: $(CORE)/.ready  ## run those without the services (PYTHON=3.11, 3.12 or 3.13)
	@$(CORE)/bin/python -m pytest -o cache_dir=.pytest_cache/chosen-core $(PARALLEL) \
	  -m "slow and chosen and not reference and not one_lane" $(ARGS)

test-core: $(CORE)/.ready  ## run the quick tests without the services (PYTHON=3.11, 3.12 or 3.13)
	@$(CORE)/bin/python -m pytest -o cache_dir=.pytest_cache/core $(PARALLEL) \
	  -m "not slow and not reference and not one_lane" $(ARGS)

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
	@rm -rf .venv .venv-core-* .tools .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	  .coverage* build dist htmlcov site *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
