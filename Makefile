# Every target sets up .venv by itself; only Python 3.11 or newer, pip and make are needed (a C++ compiler helps).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint clean
.DELETE_ON_ERROR:

$(READY): pyproject.toml constraints.txt headgate/version.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt pip setuptools
	$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e ".[dev]"
	touch $@

demo: $(READY)
	$(BIN)/headgate mechanisms
	@echo "The comparison of mechanisms (headgate compare) is not built yet; the list above is what it will compare."

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info
