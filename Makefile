# Two commands matter: `make prefill` and `make test`. Both set up the same .venv first.
# `make help` lists all of them.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODEL ?= tiny-qwen3-next
PROMPT ?= $(shell $(BIN)/python -c 'from headstart import checkpoints; print(checkpoints.sample_text())' 2>/dev/null)
VLLM := .venv-vllm
VLLM_READY := $(VLLM)/.ready
BENCHMARKS ?= $(sort $(wildcard benchmarks/*.py))

# Two workers on two cores: one thread each, or they fight over the cores.
TEST_ENVIRONMENT := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
WORKERS ?= 2
INTERPRET = TRITON_INTERPRET=1 HEADSTART_TEST_PART=$(PART) $(TEST_ENVIRONMENT)

.PHONY: help venv prefill test lint types pytest test-interpret tritons static-triton interpret-triton mutants soak format wheel-smoke bench results report-test vllm-venv vllm-test clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(READY)  ## set up .venv with every extra and the pinned development requirements

# Installs again only when the requirements change; an existing .venv is brought up to date in place.
$(READY): requirements-dev.txt pyproject.toml
	@if ! [ -x $(BIN)/pip ]; then \
		[ -n "$(PYTHON)" ] || { echo "make: Python 3.11 or newer is missing: apt-get install python3 python3-venv" >&2; exit 2; }; \
		"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
			|| { echo "make: Python 3.11 or newer is needed, $(PYTHON) is older (make PYTHON=...)" >&2; exit 2; }; \
		"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null \
			|| { echo "make: Python's venv module is missing: apt-get install python3-venv" >&2; exit 2; }; \
		echo "Setting up $(VENV) (once; about 2 GB, 2 to 3 minutes)"; \
		"$(PYTHON)" -m venv $(VENV); \
	fi
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt --editable '.[cli,evidence,models]'
	@touch $(READY)

prefill: $(READY)  ## the main job: prefill the shipped sample, compared and from a prefix hit (MODEL=, PROMPT=)
	$(BIN)/headstart prefill --model $(MODEL) --prompt-file "$(PROMPT)" --compare --prefix-cache

test: lint types pytest tritons  ## lint, type check, all tests and the docstring examples, a part of what two Tritons do

lint: $(READY)  ## check style and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY)  ## type check the package
	$(BIN)/pyright

pytest: $(READY)  ## tests and docstring examples only (WORKERS=2)
	$(TEST_ENVIRONMENT) $(BIN)/pytest --doctest-modules -n $(WORKERS) --dist worksteal

# A process of its own: Triton decides when it is imported whether kernels are interpreted.
test-interpret: $(READY)  ## the behaviour suites against the Triton kernels, in Triton's interpreter (WORKERS=2, PART=I/N)
	$(INTERPRET) $(BIN)/pytest tests/ops -n $(WORKERS) --dist worksteal

# Another Triton over all else that is in .venv.
TRITON ?= 3.9.0
OTHER := .venv-triton-$(TRITON)
$(OTHER)/.ready: $(READY)
	$(BIN)/python -m venv $(OTHER)
	$(OTHER)/bin/python -m pip install --quiet --no-deps triton==$(TRITON)
	@$(OTHER)/bin/python -c 'import pathlib, sys, sysconfig; \
		here = pathlib.Path(sysconfig.get_path("purelib")); \
		base = pathlib.Path("$(VENV)").resolve() / here.relative_to(sys.prefix); \
		(here / "base.pth").write_text(f"import site; site.addsitedir({str(base)!r})\n")'
	@touch $@

# Nothing is read from the user's cache of compiled kernels, and nothing left there.
static-triton: $(OTHER)/.ready  ## every kernel for every target with two Tritons; spills compared (TRITON=, PART=I/N, STATIC="--target cuda:90"; 45 minutes)
	@cache=$$(mktemp -d); trap 'rm -rf "$$cache"' EXIT; set -x; TRITON_CACHE_DIR=$$cache \
		$(BIN)/headstart static --triton-python $(OTHER)/bin/python $(if $(PART),--part $(PART)) $(STATIC)

interpret-triton: $(OTHER)/.ready  ## test-interpret with another Triton (TRITON=, WORKERS=2, PART=I/N)
	$(INTERPRET) $(OTHER)/bin/python -m pytest tests/ops -n $(WORKERS) --dist worksteal

# All of it takes over an hour and a half of two cores: one part a commit, and as many commits in a row as there are parts try
# everything. A prime, so that landings of some commits each do so too. Budgets are for `headstart static` alone to judge: kernels that spill are known.
PARTS := 17
tritons: $(OTHER)/.ready  ## a part of test-interpret, interpret-triton and static-triton: the commit says which (PART=I/N, TRITON=)
	@part=$(or $(PART),$$(bash tests/house/part.sh $(PARTS))); \
	echo "Part $$part of what two Tritons interpret and compile (make tritons PART=$$part)"; \
	$(MAKE) --no-print-directory PART=$$part STATIC="--report-budgets $(STATIC)" test-interpret interpret-triton static-triton

mutants: $(READY)  ## known-bad builds for a CPU: every one must fail a check (minutes)
	$(BIN)/headstart verify mutants

soak: $(READY)  ## ten minutes of short sequences from several threads (SOAK="--implementation triton --device cuda")
	$(BIN)/headstart verify soak $(SOAK)

format: $(READY)  ## format, and fix what the linter can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

wheel-smoke: $(READY)  ## build the wheel, install it into a clean environment, prefill there
	PYTHON=$(BIN)/python bash tests/house/wheel_smoke.sh

bench: $(READY)  ## measure the CPU bars: every script of benchmarks/ in turn (BENCHMARKS=)
	@for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script; done

results: $(READY)  ## write the README's tables of results from evidence/runs
	$(BIN)/headstart report evidence/runs --markdown --into README.md

# The browser is the machine's own (Debian: apt-get install chromium); without one the test is skipped.
report-test: $(READY)  ## render a report in a headless Chromium and check what is seen (CHROMIUM=)
	$(BIN)/pytest tests/evidence/test_report_seen.py -rs

vllm-venv: $(VLLM_READY)  ## set up .venv-vllm: vLLM for CPUs and this package (x86, about 3.5 GB)

# torch comes with what it needs; vLLM without the media libraries that it asks for and no model here needs.
$(VLLM_READY): requirements-vllm.txt pyproject.toml
	@[ -x $(VLLM)/bin/pip ] || "$(PYTHON)" -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet "$$(grep '^torch==' requirements-vllm.txt)"
	$(VLLM)/bin/python -m pip install --quiet --no-deps --requirement requirements-vllm.txt --editable .
	@touch $(VLLM_READY)

vllm-test: $(VLLM_READY)  ## real vLLM engines on the CPU, with the plugin and without (about 6 minutes)
	$(TEST_ENVIRONMENT) $(VLLM)/bin/python -m pytest tests/integrations/vllm

clean:  ## remove build and test leftovers; .venv stays
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
