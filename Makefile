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

# a worker more than cores: tests of several processes, all on one (tests/workers.py), mostly wait
CORES := $(shell getconf _NPROCESSORS_ONLN 2> /dev/null || echo 2)
IN_PARALLEL := -n $(shell echo $$(($(CORES) < 8 ? $(CORES) + 1 : 8))) --dist loadfile --no-loadscope-reorder
test: install .venv/.cuda
	$(BIN)/python -m pytest $(IN_PARALLEL) -m 'not long' $(ARGS)

test-long: install .venv/.cuda
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest $(IN_PARALLEL) $(ARGS)

# two environments, because Instructor needs an older openai package; npm holds the coding agents
CLIENTS := .venv-clients
CLIENT_LISTS := clients clients-instructor
test-clients: install $(CLIENTS)/.installed
	$(BIN)/python -m pytest tests/end_to_end/clients tests/end_to_end/test_openapi_fuzzed.py $(ARGS)

$(CLIENTS)/.installed: $(CLIENT_LISTS:%=constraints/%.txt) constraints/clients-npm.txt
	@command -v npm > /dev/null || { echo 'npm and Node.js 20 are missing (Debian: apt-get install nodejs npm)'; exit 1; }
	@for list in $(CLIENT_LISTS); do \
		$(PYTHON) -m venv $(CLIENTS)/$$list && \
		$(CLIENTS)/$$list/bin/python -m pip install --quiet --requirement constraints/$$list.txt || exit 1; \
	done
	npm install --silent --no-audit --no-fund --prefix $(CLIENTS) $$(cat constraints/clients-npm.txt)
	@touch $@

# the model alone; `python -m whalepod.tools.peers --help` says how to compare with llama.cpp and vLLM
bench: install
	$(BIN)/python -m whalepod.tools.measure decode v3-mini --rounds 1
	$(BIN)/python -m whalepod.tools.measure prefill v3-mini --rounds 1

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=.src $(BIN)/lint-imports --no-cache
	$(BIN)/python -m whalepod.tools.size
