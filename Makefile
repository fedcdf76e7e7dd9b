# Each target does all of its own set-up: only Python >= 3.11, pip and make are needed. Where there is no Chromium, root's
# `make test` installs Debian's once, for the tests that look at the report; without it those are skipped.
PYTHON ?= python3
VENV := .venv
# `make test TORCH=2.15.0`: in an environment of its own, of that release and of $(PYTHON)
TORCH ?=
ifneq ($(TORCH),)
VENV := .venv-torch-$(TORCH)-py$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
endif
BIN := $(VENV)/bin
CONSTRAINTS := $(if $(TORCH),$(VENV)/)constraints.txt
READY := $(VENV)/.ready
DEV_READY := $(VENV)/.ready-dev
INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)
RESULTS ?= benchmarks/results
PYTHON_THERE ?= 3.11 3.12 3.13 3.14

.PHONY: help recipes train test test-all anywhere browser check dist-check streams prove faults bench gpu gpu-wheels docs clean

help:
	@echo "make train      train the demo, a byte-level GPT, to its end (about 3 minutes on 2 cores)"
	@echo "make test       all tests but the slow ones;  make test-all: all"
	@echo "make test TORCH=2.15.0   the same in an environment of its own, of another torch (PYTHON=python3.13: and Python)"
	@echo "make anywhere   the quick tests as another user, after a demo run, with other threads, locales … (WHERE=word for some)"
	@echo "make check      ruff, pyright, the direction of imports, budgets of folders and plain words"
	@echo "make dist-check wheel and sdist, each installed in an environment of its own and tried (some minutes)"
	@echo "make streams    streams of torchdata and datasets, left and taken up (installs 300 MB)"
	@echo "make prove      the promise, one row per way of cutting or stopping a run (ROWS=pattern for some)"
	@echo "make faults     inject every fault of the battery, one line each (FAULTS=pattern for some)"
	@echo "make docs       the documentation as a site, in build/site"
	@echo "make gpu        tests and figures on a CUDA device, with the python3 that has torch there (ROWS=word for some)"
	@echo "make gpu-wheels what make gpu needs beside torch, to be taken along (PYTHON_THERE=3.12 for one Python)"
	@echo "make recipes    trains recipes to their end, with three seeds, and proves each: an hour (RECIPES=word for some; ARGS=--prove)"
	@echo "make bench      against plain loops and other trainers (NAME=overhead for one)"

# each torch says which setuptools it takes
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("evenstep needs Python >= 3.11, but this is " + sys.version) if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),sed 's/^torch==.*/torch==$(TORCH)/; /^setuptools==/d' constraints.txt > $(CONSTRAINTS))
	$(if $(TORCH),$(INSTALL) torch==$(TORCH),$(INSTALL) -e '.[demo]')
	@touch $@

# another torch than is allowed can only be tried without asking what is allowed
$(DEV_READY): $(READY)
	$(if $(TORCH),$(BIN)/python tests/dist/requirements.py > $(VENV)/needs.txt)
	$(if $(TORCH),$(INSTALL) -r $(VENV)/needs.txt,$(INSTALL) -e '.[dev]')
	$(if $(TORCH),$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -e .)
	@touch $@

train: $(READY)
	$(BIN)/evenstep demo --resume auto $(ARGS)

browser: build/.browser

build/.browser:
	@mkdir -p build
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || \
		timeout 240 sh -c 'apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
		chromium fonts-dejavu-core' >build/browser.log 2>&1 || echo "no browser: the report's tests in one are skipped (build/browser.log)"
	@touch $@

test: $(DEV_READY) browser
	$(BIN)/pytest -m 'not slow' -n 3 --dist worksteal --doctest-modules src tests

anywhere: $(DEV_READY)
	$(BIN)/python tests/anywhere.py --where '$(WHERE)'

test-all: $(DEV_READY) browser
	$(BIN)/pytest -n 3 --dist worksteal --doctest-modules src tests

check: $(DEV_READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/pytest tests/unit/test_imports.py
	$(BIN)/python tests/house.py

dist-check: $(DEV_READY)
	$(BIN)/pip install --quiet --disable-pip-version-check build twine
	$(BIN)/python tests/dist/check.py

streams: $(DEV_READY)
	$(INSTALL) -e '.[streams]'
	$(BIN)/pytest -n 2 tests/usage/test_streams.py

prove: $(DEV_READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/promise/prove.py --rows '$(ROWS)'

faults: $(DEV_READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/run.py --faults '$(FAULTS)'

recipes: $(DEV_READY)
	OMP_NUM_THREADS=1 $(BIN)/python recipes/run.py --recipes '$(RECIPES)' $(ARGS)

bench: $(DEV_READY)
	$(BIN)/python benchmarks/run.py $(NAME)

# on a machine with a CUDA device and no network: neither make a .venv nor install anything
gpu:
	$(PYTHON) tests/gpu/run.py --rows '$(ROWS)' --results '$(RESULTS)'

gpu-wheels: $(READY)
	$(BIN)/python tests/gpu/wheels.py --python $(PYTHON_THERE)

docs: $(DEV_READY)
	$(INSTALL) -e '.[docs]'
	$(BIN)/zensical build --strict
	@echo "read it at http://localhost:8000:  $(BIN)/python -m http.server 8000 --directory build/site"
	@echo "(opened from the disk, build/site/index.html, all of it works but the search)"

clean:
	rm -rf $(VENV) .venv-peers build dist
