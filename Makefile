# Two commands on a fresh machine: make parity, make test. Continuous integration runs the same lines.

PYTHON ?= python3
WORKERS ?= 2
REPORTS ?= reports
VENV := .venv
BIN := $(VENV)/bin
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--custom-compile-command "make lock" $(if $(UPGRADE),--upgrade)

.DEFAULT_GOAL := help
.PHONY: help setup parity test gate llama-server lint lock clean

help: ## print this list
	@echo 'samebytes: same identity, same bytes. Needs Python 3.11 or newer and a C/C++ compiler; no GPU, no model.'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' Makefile | expand -t 20
	@echo 'Variables: PYTHON=python3.12 (interpreter for .venv), WORKERS=2 (test processes), PYTEST_ARGS="-m family_llama",'
	@echo '  PARITY_ARGS="--family qwen3next", REPORTS=folder, UPGRADE=1 (with lock), SAMEBYTES_CACHE=folder (wheel, models, oracle),'
	@echo '  SAMEBYTES_CMAKE_ARGS="-D..." (more flags for llama.cpp; each set of flags has its own cached wheel).'
	@echo 'After set-up: .venv/bin/pytest, .venv/bin/pytest -m family_qwen3next, .venv/bin/parity --help'

setup: ## create or update .venv; llama.cpp is compiled once per machine and kept
	@command -v $(PYTHON) >/dev/null || { echo "samebytes: no Python in PATH: $(PYTHON) is not a command;" \
		"install Python 3.11 or newer or run: make setup PYTHON=/path/to/python3.11" >&2; exit 64; }
	@$(PYTHON) .ci/setup.py

parity: setup ## the main job: every family, concurrent against alone, a table and one verdict
	@$(BIN)/parity check $(PARITY_ARGS)

test: setup ## the whole default suite
	@$(BIN)/pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

gate: setup ## the merge gate's verdict and its reports in reports/
	@mkdir -p $(REPORTS)
	@$(BIN)/parity gate --json $(REPORTS)/gate.json --junit $(REPORTS)/gate.xml \
		--markdown $(REPORTS)/gate.md --html $(REPORTS)/gate.html $(PARITY_ARGS)

llama-server: setup ## llama-server of the locked commit into .venv/bin (FAULTS=1: another one with planted faults)
	@$(PYTHON) .ci/build_llama_server.py $(if $(FAULTS),--faults)

lint: setup ## ruff and mypy over the code; schema and security linters over the workflows
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-actions .github/actions/*/action.yml
	@$(BIN)/zizmor --offline --quiet --strict-collection .github

lock: setup ## rewrite requirements/*.txt from pyproject.toml (UPGRADE=1 takes newer versions)
	@$(COMPILE) --all-extras --no-emit-package llama-cpp-python pyproject.toml -o requirements/lock.txt
	@$(COMPILE) requirements/build.in -o requirements/build.txt
	@grep -o 'llama-cpp-python==[0-9.]*' pyproject.toml | $(COMPILE) --no-deps --no-annotate - -o requirements/llama.txt

clean: ## remove .venv, reports and caches of this checkout (not the wheel, models and oracle in SAMEBYTES_CACHE)
	@rm -rf $(VENV) .venv.lock $(REPORTS) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
