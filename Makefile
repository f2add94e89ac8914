# What a checkout can do. On a fresh machine with Python ≥ 3.11 and make, `make demo` and
# `make test` are enough: everything is installed into .venv, nothing anywhere else.
#
#   PYTHON=python3.12    the Python to make .venv with
#   TORCH_INDEX=URL      take torch from this index, such as https://download.pytorch.org/whl/cpu

PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
DEMO := levelhead-demo
CPU_INDEX := https://download.pytorch.org/whl/cpu
PIP := $(BIN)/pip install --quiet --no-input --disable-pip-version-check -c constraints.txt
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
INPUTS := pyproject.toml constraints.txt $(VENV)/torch-index

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo install test test-slow lint mutants bench clean distclean force

help:
	@echo "make demo       install what the demo needs, run it, say where the report is"
	@echo "make test       linters, types, import contracts and all tests but the slow ones"
	@echo "make test-slow  the tests that take minutes"
	@echo "make lint       linters, types and import contracts alone"
	@echo "make mutants    plant known faults; the tests must catch each"
	@echo "make bench      measure speed, as ratios in one process"
	@echo "make install    only create or update .venv for these"
	@echo "make clean      remove what the tools leave behind; make distclean: .venv, too"

demo: $(VENV)/demo-installed
	@rm -rf $(DEMO)
	@$(BIN)/levelhead demo --out $(DEMO)
	@echo "The report is a file to open in a browser: file://$(CURDIR)/$(DEMO)/report.html"

install: $(VENV)/dev-installed

test: lint
	$(PYTEST)

test-slow: $(VENV)/dev-installed
	$(PYTEST) -m slow -o timeout=1200 || [ $$? -eq 5 ]  # 5: there are none

lint: $(VENV)/dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

mutants: $(VENV)/dev-installed
	$(BIN)/python tests/mutants.py

bench: $(VENV)/dev-installed
	$(BIN)/python -m pytest benchmarks -o python_files="bench_*.py test_*.py"

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .benchmarks
	rm -rf .mutants build dist $(DEMO)
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

# ── .venv ──

# These marks say what is installed; they grow old when the project's needs change.
$(VENV)/demo-installed: $(INPUTS)
	@$(call say_size,0.3 GB,2.8 GB)
	$(PIP) -e ".[demo]"
	@touch $@

# curvlinops, which benchmarks compare with, asks for torchvision by way of backpack without using
# it, and pip would take a build of it that does not load beside this torch.
$(VENV)/dev-installed: $(INPUTS)
	@$(call say_size,0.6 GB,3.1 GB)
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps "curvlinops-for-pytorch>=3" "backpack-for-pytorch>=1.6" "unfoldNd>=0.2"
	@touch $@

# Silent where torch is there already: what is left to fetch is small then.
define say_size
ls -d $(VENV)/lib/python*/site-packages/torch >/dev/null 2>&1 || { \
  echo "About $(1) will be downloaded with torch for CPUs (the usual one on macOS and Windows), $(2)"; \
  echo "with torch and NVIDIA's libraries (the usual one on Linux). Without such a card, stop this by"; \
  echo "Ctrl-C and say: make $(firstword $(MAKECMDGOALS)) TORCH_INDEX=$(CPU_INDEX)"; }
endef

# torch alone comes from TORCH_INDEX, all else from the usual place; the mark says which torch it is.
$(VENV)/torch-index: force | $(BIN)/pip
	@wanted="$(TORCH_INDEX) $$(grep -v '^#' constraints.txt)"; \
	if [ -z "$(TORCH_INDEX)" ]; then [ -e $@ ] || touch $@; \
	elif [ "$$(cat $@ 2>/dev/null)" != "$$wanted" ]; then \
	  echo "torch will be downloaded from $(TORCH_INDEX)"; \
	  echo "(0.2 GB if it is a build for CPUs), then 0.1 GB of other packages, 0.25 GB for make test."; \
	  $(PIP) --no-deps --force-reinstall --index-url "$(TORCH_INDEX)" torch && echo "$$wanted" > $@; \
	fi

$(BIN)/pip:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null || { \
	echo "$(PYTHON) is not Python 3.11 or newer: install one, or name it with make PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -c "import ensurepip, venv" 2>/dev/null || { \
	echo "$(PYTHON) cannot make environments: install its venv package (Debian, Ubuntu: apt install python3-venv)." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
