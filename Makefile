# `make demo` and `make test` are all a fresh machine needs: each makes the virtual environment first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The models of the tests and of the demo are tiny: two processes with more threads than cores run many times slower.
export OMP_NUM_THREADS ?= 1

.PHONY: help venv demo test test-all lint clean

help:
	@echo "make demo      install, then prove the bundled tiny models token for token against eager"
	@echo "make test      install, then lint and the tests"
	@echo "make test-all  the same with the slow tests"
	@echo "make lint      ruff"
	@echo "make venv      only install, into $(VENV), with \$$(PYTHON), now '$(PYTHON)'"
	@echo "make clean     remove $(VENV), builds and caches"

venv: $(STAMP)

# Made again only when what is to be installed changes, the CPU kernels' sources too; the checkout itself is
# installed editable. Without a C++ compiler it is installed without the kernels.
$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard kernels/*/cpu*.cpp kernels/*/cpu*.h kvgroups/kernels/cpu/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvgroups needs Python 3.11 or newer, and '$(PYTHON)' is" \
	    "$$($(PYTHON) --version 2>&1). Name another one: make PYTHON=python3.11 $(or $(MAKECMDGOALS),venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $(STAMP)

demo: venv
	$(BIN)/kvgroups parity

test: venv lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-all: venv lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m ""

lint: venv
	$(BIN)/ruff check .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	rm -f kvgroups/kernels/_cpu.so
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
