# Two commands for a newcomer: `make quickstart`, `make test`. Everything happens in .venv.
PYTHON ?= python3
SEED ?= 0
# Where pip finds torch. Linux without a GPU: TORCH_INDEX="--index-url https://download.pytorch.org/whl/cpu" saves several GB.
TORCH_INDEX ?=
BIN = .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: quickstart test test-slow test-gpu check format bench bench-engine bench-trainer bench-gateway bench-step clean

quickstart: .venv/installed
	@$(BIN)/python examples/quickstart/main.py --seed $(SEED)

test: .venv/installed
	$(BIN)/python -m pytest

test-slow: .venv/installed
	$(BIN)/python -m pytest -m slow

test-gpu: .venv/installed
	$(BIN)/python -m pytest -m gpu

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: bench-engine bench-trainer bench-gateway bench-step

bench-engine bench-trainer bench-gateway bench-step: bench-%: .venv/installed
	$(BIN)/python bench/$*.py

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "AgentTune needs Python 3.11 to 3.13; this is $$($(PYTHON) --version). Use: make PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(TORCH_INDEX) "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
