# Everything a contributor types. `make` alone lists the targets.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
LESSONS_STAMP := $(VENV)/.installed-lessons
PYTEST := $(BIN)/python -m pytest

# A runtime of protobuf refuses modules of a newer compiler and takes those of the major before its own: this one, of 6.31, suits 6.31 to 7.
PROTOC := grpcio-tools==1.73.1

# What writes the generated pages; each knows --check.
GENERATORS := config_reference conformance error_codes guarantees protocol_reference

# One intra-op thread a process: fp32 results are then equal bit for bit, and two busy cores are not shared by four threads.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo test chaos compat cookbook-compat coverage check lint format-check types layers docs-fresh mutants docs openapi seeds proto clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | while IFS='|' read -r name text; do printf '  make %-14s %s\n' "$$name" "$$text"; done

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[server,cookbook,dev]'
	touch $@

$(LESSONS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[reasoning]'
	touch $@

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

demo: $(STAMP) ## fine-tune a real model over HTTP: install, fetch, serve, train, sample, stop
	$(BIN)/tinsmith fetch smollm2
	$(BIN)/python cookbook/demo.py

test: $(LESSONS_STAMP) ## every test: unit, contract, integration, e2e
	$(BIN)/tinsmith fetch smollm2
	$(PYTEST) tests/unit tests/contract tests/integration tests/e2e

chaos: $(STAMP) ## the fault matrix: faults in every place of a real server, and the page about them
	rm -f out/fault-matrix.json
	$(PYTEST) tests/chaos
	$(BIN)/python docs/scripts/fault_matrix.py

compat: $(STAMP) ## the compatibility list with every release of the SDK, and the page about it
	$(BIN)/tinsmith fetch smollm2
	$(BIN)/python -m tests.compat

cookbook-compat: $(STAMP) ## train through the tinker-cookbook's own functions, in an environment of its own
	$(BIN)/tinsmith fetch smollm2
	$(BIN)/python -m tests.compat.cookbook

coverage: $(LESSONS_STAMP) ## line coverage of src by the unit, contract and integration tests; fails under 90 %
	$(PYTEST) tests/unit tests/contract tests/integration --cov --cov-report=term-missing:skip-covered --cov-fail-under=90

check: lint format-check types layers docs-fresh ## what pre-commit runs

lint: $(STAMP)
	$(BIN)/ruff check

format-check: $(STAMP)
	$(BIN)/ruff format --check

types: $(STAMP)
	$(BIN)/mypy

layers: $(STAMP)
	$(BIN)/lint-imports

docs-fresh: $(STAMP)
	@for script in $(GENERATORS); do $(BIN)/python docs/scripts/$$script.py --check || exit 1; done

mutants: $(STAMP) ## plant each listed fault in a copy of the tree and see the named test fail
	$(BIN)/python -m tests.mutants

openapi: $(STAMP) ## write the committed route inventory of the native API anew, after a change of it that is meant
	$(BIN)/python docs/scripts/openapi_baseline.py

seeds: $(STAMP) ## the lane invariants on both stores, 20 runs with different seeds
	@for seed in $$(seq 1 20); do echo "seed $$seed"; TINSMITH_TEST_SEED=$$seed $(PYTEST) -q tests/contract/test_invariants.py tests/integration/test_redis_wakeups.py || exit 1; done

docs: $(DOCS_STAMP) ## build the documentation into site/
	@for script in $(GENERATORS); do $(BIN)/python docs/scripts/$$script.py || exit 1; done
	$(BIN)/mkdocs build --strict

proto: ## generate the protobuf module from our .proto
	$(PYTHON) -m venv out/protoc
	out/protoc/bin/python -m pip install --quiet '$(PROTOC)' 'setuptools<81'
	out/protoc/bin/python -m grpc_tools.protoc -Isrc --python_out=src --pyi_out=src src/tinsmith/protocol/tinker.proto

clean: ## remove what the targets made, the virtual environment included
	rm -rf $(VENV) out site build dist .coverage* .hypothesis .schemathesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
