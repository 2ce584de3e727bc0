# make demo: from nothing to a trained model and a report.   make test: lint, types and tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo box docs test lint types unit tools soak gpu bench release-check format clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(STAMP): pyproject.toml constraints.txt $(wildcard packages/*/pyproject.toml)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v[:2] <= (3, 13) else f"Python 3.11 to 3.13 is needed, this is {v.major}.{v.minor}; try: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,docs,serve,ui,test]' $(patsubst %/pyproject.toml,-e %,$(wildcard packages/*/pyproject.toml))
	@touch $@

demo: $(STAMP)  ## prepare the built-in text, train a small model, evaluate it, write a report
	$(BIN)/mmldlm demo

box: $(STAMP)  ## train and build packages/mmldlm-wordnet: make box TEXT=train.jsonl.gz VALIDATION=valid.jsonl.gz (one GPU, minutes)
	$(BIN)/python scripts/build_box.py $(if $(TEXT),--text $(TEXT)) $(if $(VALIDATION),--validation $(VALIDATION))

docs: $(STAMP)  ## the documentation as a site, in build/site
	$(BIN)/python scripts/site/build.py

test: $(STAMP) lint  ## everything that must hold: lint, types, tests, documentation
	@$(MAKE) --no-print-directory -j 2 unit tools

lint: $(STAMP)  ## style
	$(BIN)/ruff check src packages tests scripts examples
	$(BIN)/ruff format --check src packages tests scripts examples

types: $(STAMP)  ## static types
	$(BIN)/mypy

PYTEST := python -m pytest -m 'not soak'

unit: $(STAMP)  ## the tests of the trainer
	$(BIN)/$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder

# beside the tests of the trainer, which wait a lot: one core's work
tools: types  ## static types, then the tests of runwatch and traindoctor
	cd packages/runwatch && ../../$(BIN)/$(PYTEST)
	cd packages/traindoctor && ../../$(BIN)/$(PYTEST)

soak: $(STAMP)  ## the long-running tests, then kills, flipped bits, failing disks and lost ranks (an hour; disks need root)
	$(BIN)/python -m pytest -m soak
	$(BIN)/python scripts/fuzz_files.py 3600
	$(BIN)/python scripts/chaos.py $(or $(CHAOS),build/chaos)

gpu: $(STAMP)  ## the tests that need a GPU
	$(BIN)/python -m pytest -m gpu

bench: $(STAMP)  ## what the speed-ups are worth on this CPU, at a small shape, in a few minutes
	$(BIN)/mmldlm benchmark --recipe laptop --ladder full --only packed --only 'scored rows' --only everything \
	  --repeats 2 --steps 40 --warmup 4 --block 10 --gate-steps 3 --vocabulary 4096 --documents 4096 \
	  batch.tokens_per_step=512 model.width=128 speed.chunk_rows=512 train.device=cpu train.num_threads=1

release-check:  ## build wheels and sdists of all packages, install and run each in a clean environment
	$(PYTHON) scripts/release_check.py

format: $(STAMP)  ## rewrite the code in our style
	$(BIN)/ruff check --fix src packages tests scripts examples
	$(BIN)/ruff format src packages tests scripts examples

clean:  ## remove what was built (runs and data stay)
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache
