# Two commands are enough on a fresh machine: `make run` and `make test`. Both set up .venv first.
#   make run ARGS="compressor=fsdp bandwidth=10gbps"     override anything of the main job
#   make test ARGS="tests/codec -k peel"                 run some of the tests

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two stages: the training needs a third of what the tests need (Triton alone is 1 GB, and of use on a GPU only).
RUN_STAMP := $(VENV)/.installed-run
STAMP := $(VENV)/.installed
SOURCES := run.py tagc tests experiments analysis

.DEFAULT_GOAL := help
.PHONY: help setup run test check fix bench gpu-check report results wandb-sync wandb-dashboard clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## create .venv and install everything under constraints.txt (a second time: nothing to do)

# --no-compile: Python compiles what it imports at first use, which is less than all that is installed
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-compile --quiet --progress-bar off -c constraints.txt

$(RUN_STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "tagc needs Python 3.11 or newer; name one: make setup PYTHON=python3.12"; exit 1; }
	@echo "1/3 creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "2/3 installing torch (760 MB on disk in its CPU build)"
	@$(INSTALL) torch
	@echo "3/3 installing what training needs: numba, Hydra, W&B, tokenizers (400 MB)"
	@$(INSTALL) -e '.[lab]'
	@touch $@

$(STAMP): $(RUN_STAMP)
	@echo "installing what tests, checks and analysis need: pytest, mypy, pandas, Triton (1 GB); a minute or two"
	@$(INSTALL) -e '.[dev]'
	@touch $@

run: $(RUN_STAMP)  ## run the main job: nano GPT, 2 ranks, TAGC-2, built-in data (ARGS=... adds overrides)
	$(BIN)/python run.py experiment=main $(ARGS)

test: $(STAMP)  ## run the tests (ARGS=... goes to pytest)
	$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)  ## lint, formatting and types; changes nothing
	$(BIN)/ruff check --no-fix $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

bench: $(STAMP)  ## time the kernels against a copy, once their tests pass (QUICK=1: one setting, about a minute)
	$(BIN)/python -m pytest tests/kernels $(if $(QUICK),-m timed -n 0)
	$(BIN)/python -m experiments.kernels.bench $(if $(QUICK),--quick) $(ARGS)

gpu-check: $(STAMP)  ## on a machine with a GPU: kernel tests, waits, speed, GPT-2 steps (6 minutes at most)
	$(BIN)/python -m experiments.gpu_check $(ARGS)

wandb-sync: $(RUN_STAMP)  ## upload to W&B what it lacks of the runs in outputs/ and multirun/ (ARGS=... names other folders)
	$(BIN)/python -m tagc.record.wandb.sync $(ARGS)

wandb-dashboard: $(STAMP)  ## save the dashboard as a view of the W&B project (ARGS="--project NAME"; --print sends nothing)
	$(BIN)/python -m tagc.record.wandb.dashboard $(ARGS)

report: $(STAMP) results  ## every committed table, and a page with all figures in report/, from the recorded rows
	$(BIN)/python -m experiments.iteration_time.table > /dev/null
	$(BIN)/python -m experiments.cost_model.evidence
	$(BIN)/python -m analysis.report experiments -o report $(ARGS)

results: $(STAMP)  ## the answer in README.md and docs/results.md, from the recorded rows
	$(BIN)/python -m analysis.results

fix: $(STAMP)  ## mend what the linter and the formatter can
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:  ## remove .venv and caches; recorded runs stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
