# Two commands for everybody: `make demo` and `make test`. Both set up .venv first where it is missing or old.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.packtrain-ready

# A build of torch without CUDA where there is no GPU. Elsewhere pip's default, the CUDA build, is right.
TORCH := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo "torch>=2.11,<2.15" || cat constraints-cpu.txt)

.PHONY: demo test lint setup clean

demo: setup
	$(BIN)/packtrain demo

test: setup
	$(BIN)/python -m pytest -m "not slow and not shared and not gpu"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

setup: $(READY)

$(READY): pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
