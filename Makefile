# `make serve` and `make test` are all that a newcomer needs; both install what is missing.
PYTHON ?= python3
BIN := .venv/bin
.PHONY: install serve test test-long test-clients bench check

install: .venv/.installed
.venv/.installed: pyproject.toml constraints/cpu.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints/cpu.txt --editable '.[dev]'
	@touch $@

serve: install
	@exec $(BIN)/whalepod serve $(ARGS)

# the wheels of NVSHMEM and CuPy import without a GPU: tests compare what we call, and link the bitcode
.venv/.cuda: .venv/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints/cpu.txt --editable '.[dev,cuda]'
	@touch $@

test: install .venv/.cuda
	$(BIN)/python -m pytest -m 'not long' $(ARGS)

test-long: install .venv/.cuda
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest $(ARGS)

test-clients: install
	$(BIN)/python -m pytest tests/end_to_end/clients $(ARGS)

bench: install
	$(BIN)/whalepod bench serve --help

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=.src $(BIN)/lint-imports --no-cache
