# The commands of the README. Installation is in tools/install.sh, which does each step once.
#
#   make serve [MODEL=...] [HOST=...] [PORT=...] [ARGS="--max-model-len 4096"]
#   make test | test-all | test-gpu | lint
#
# If installation fails, set PYTHON=, TORCH_SPEC= or TORCH_INDEX= on the command line.

export VENV ?= .venv
export PYTHON TORCH_SPEC TORCH_INDEX

# Tests run in a process a core; each takes a stretch of them, and what another has not come to yet.
WORKERS := -n logical --maxprocesses 4 --dist worksteal

DEFAULT_MODEL := smollm2-135m-instruct
MODEL ?= $(DEFAULT_MODEL)
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=

ifneq ($(MODEL),$(DEFAULT_MODEL))
serve: export SKIP_DEFAULT_MODEL = 1
endif

.PHONY: help serve test test-all test-gpu lint clean

help:
	@sed -n '1,7s/^# \{0,1\}//p' Makefile

serve:
	@tools/install.sh serve
	@exec $(VENV)/bin/compiled-engine serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

test:
	@tools/install.sh test
	$(VENV)/bin/pytest -m "not gpu and not slow" $(WORKERS) $(ARGS)

test-all:
	@tools/install.sh test
	$(VENV)/bin/pytest -m "not gpu" $(ARGS)

test-gpu:
	@tools/install.sh test
	$(VENV)/bin/pytest -m gpu $(ARGS)

lint:
	@tools/install.sh lint
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV)
