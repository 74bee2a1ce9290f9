# Each target sets up .venv by itself; only Python 3.11 to 3.13 with pip and make are needed beforehand.
#
#   make demo    install, then train the quickstart recipe
#   make test    every test (slow ones too)
#   make lint    ruff, mypy, import-linter
#   make bench   the side-by-side benchmarks
#   make format  let ruff rewrite what it can
#   make clean   remove caches and build outputs (make distclean: .venv too; runs/ is yours and stays)

PYTHON ?= python3
TEST_WORKERS ?= 2
PYTEST_FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin
DISTS := core plugins loongforge_plugins megatrain_plugins
PIP := $(BIN)/python -m pip --disable-pip-version-check

# A stamp's name holds a digest of what the installation depends on (this folder's path too: the installs are editable). The
# same inputs find their stamp and start at once; a checkout that only touches files does not install again.
digest = $(shell (pwd; cat $(1)) | sha256sum | cut -c1-16)
RUNTIME_INPUTS := $(DISTS:%=%/pyproject.toml) constraints.txt
DEV_INPUTS := $(RUNTIME_INPUTS) requirements-dev.txt
RUNTIME := $(VENV)/.runtime-$(call digest,$(RUNTIME_INPUTS))
DEV := $(VENV)/.dev-$(call digest,$(DEV_INPUTS))

# Where PYTHONDONTWRITEBYTECODE is set, every start would compile torch again (2 s become 3.6 s). Up-to-date files are
# skipped; templates inside some packages are no valid Python, hence no failure here.
compile = $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true

.PHONY: demo test lint bench format clean distclean help
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

demo: $(RUNTIME)
	$(BIN)/forge run

test: $(DEV)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile $(PYTEST_FLAGS)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(RUNTIME)
	$(BIN)/python -m benchmarks

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	    { echo "TrainForge needs Python 3.11 to 3.13, and $(PYTHON) is none of them: make PYTHON=/path/to/python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	    { rm -rf $(VENV); echo "$(PYTHON) cannot make a virtual environment (on Debian: apt install python3-venv)"; exit 1; }

$(RUNTIME): | $(BIN)/python
	@echo "Installing TrainForge into $(VENV) (1 to 2 minutes the first time, most of it torch)"
	@rm -f $(VENV)/.runtime-*
	$(PIP) install $(DISTS:%=-e %) -c constraints.txt
	@$(compile)
	@touch $@

$(DEV): | $(RUNTIME)
	@rm -f $(VENV)/.dev-*
	$(PIP) install -r requirements-dev.txt -c constraints.txt
	@$(compile)
	@touch $@

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find $(DISTS) $(wildcard tests benchmarks docs examples) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
