# Tasks of this project. `make` alone lists them. Paths are relative, so any folder works, with spaces too.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
# Some containers set it: then each of the hundreds of processes that tests start compiles every module again.
unexport PYTHONDONTWRITEBYTECODE

# The first Python that is new enough; `make PYTHON=/path/to/python install` chooses another.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
PY := .venv/bin/python
# What pgcdc and the demo need, and what tests, lint and benchmarks need besides
RUN := .venv/.installed
DEV := .venv/.installed-dev
ARCHIVE := .venv/classes/made
# Types of pgcdc.adapters, for mypy and editors
STUB := src/pgcdc/adapters.pyi
SOURCES := pyproject.toml setup.py tools/set_up.py $(shell find src -name '*.pyx' -o -name '*.pxd')
ROUNDS ?= 30
# More than the two cores of CI: tests wait for servers and timeouts about a third of their time
JOBS ?= 3
ARGS ?=
SEED ?= 1
MINUTES ?= 10
SERVER ?= both

.PHONY: help install demo test torture campaign-ddl docs docs-serve lint format bench bench-quick bench-against test-servers clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(RUN) ## Create .venv with what pgcdc needs; .venv/bin/pgcdc is the command

# Nothing here runs, and no network is used, while a stamp is newer than its sources.
$(RUN) $(DEV): $(SOURCES)
	@if [ -z "$(PYTHON)" ]; then echo "Python 3.11 or newer is needed: install it, or run: make PYTHON=/path/to/python $@" >&2; exit 2; fi
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is no Python 3.11 or newer: run make PYTHON=/path/to/python install" >&2; exit 2; }
	@"$(PYTHON)" tools/set_up.py $(if $(filter $(DEV),$@),dev)
	@touch $(if $(filter $(DEV),$@),$(RUN)) $@

# Half of the CPU time of a start of Spark, for tests that start it dozens of times
$(ARCHIVE): | $(DEV)
	@echo "Preparing an archive of Spark's classes: once, about 20 s" >&2
	@PGCDC_CLASS_ARCHIVE="$(CURDIR)/$(@D)" $(PY) -m pgcdc.run.warm
	@touch $@

demo: install ## Embedded PostgreSQL, traffic, Spark and a live view for 30 seconds
	@.venv/bin/pgcdc playground --seconds 30 $(ARGS)

test: $(DEV) $(ARCHIVE) ## Every test but the slow ones, in three processes (JOBS=3)
	@$(PY) -m pytest -m "not slow" --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder --durations=25 $(ARGS)

torture: $(DEV) $(ARCHIVE) ## Slow scenarios: random kill -9 under load (ROUNDS=30)
	@PGCDC_TORTURE_ROUNDS="$${PGCDC_TORTURE_ROUNDS:-$(ROUNDS)}" $(PY) -m pytest -m slow $(ARGS)

campaign-ddl: $(DEV) ## A slice of random DDL against a mirror (SEED=1 MINUTES=10 SERVER=15|18|both)
	@$(PY) tests/campaign_ddl.py --seed $(SEED) --minutes $(MINUTES) --server $(SERVER) $(ARGS)

# mkdocs-material tells of its successor at every start.
docs docs-serve lint: export NO_MKDOCS_2_WARNING := 1

docs: $(DEV) ## The documentation site in build/site; links and anchors are checked
	@$(PY) -m mkdocs build --quiet
	@echo "Open build/site/index.html"

docs-serve: $(DEV) ## The same at http://127.0.0.1:8000, built again at every change
	@$(PY) -m mkdocs serve --livereload

$(STUB): tools/adapter_reference.py pyproject.toml $(shell find src/pgcdc/sink -name '*.py') | $(DEV)
	@$(PY) tools/adapter_reference.py --stub

lint: $(DEV) $(STUB) ## ruff (rules and format), mypy strict, and the documentation site
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(PY) -m mkdocs build --quiet

format: $(DEV) ## Rewrite the code as ruff wants it
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

bench: $(DEV) ## Measure against the bars and the figures before; makes docs/benchmarks.md (ARGS=--list: sections)
	@$(PY) benchmarks/run.py $(ARGS)

bench-quick: $(DEV) ## The core figures in a few minutes: what got worse? (ARGS=--write keeps them)
	@$(PY) benchmarks/quick.py $(ARGS)

bench-against: $(DEV) ## This tree against an older commit, taking turns: REV=v0.1.0
	@$(PY) benchmarks/against.py $(REV) $(ARGS)

test-servers: ## Optional: PostgreSQL 15 with wal2json, and its JDBC driver, for tests and benchmarks (Debian, root)
	@if [ -x /usr/lib/postgresql/15/bin/postgres ] && [ -e /usr/lib/postgresql/15/lib/wal2json.so ] \
			&& [ -e /usr/share/java/postgresql.jar ]; then \
		echo "PostgreSQL 15 and its JDBC driver are installed."; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends postgresql-15 postgresql-15-wal2json \
			libpostgresql-jdbc-java; \
	elif command -v apt-get >/dev/null; then echo "Needs root. Run: sudo make test-servers"; \
	else echo "Install PostgreSQL 15 so that /usr/lib/postgresql/15/bin/postgres exists. Tests run without it, too."; fi

clean: ## Remove everything that can be made again
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .pgcdc src/*.egg-info
	find src tests -name '__pycache__' -type d -prune -exec rm -rf {} +
	find src -name '*.so' -type f -delete
	rm -f $(STUB)
	find src -name '*.pyx' -exec sh -c 'rm -f "$${1%.pyx}.c"' _ {} ';'
