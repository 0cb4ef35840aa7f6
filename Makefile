# These commands do everything on a fresh machine with Python 3.10 to 3.13:
#   make demo   sets up, trains plain and balanced on three unequal workers, shows the difference
#   make test   sets up, checks style and types, runs every test that protects a user
#   make docs   builds the documentation site in site/
#   make picture   runs the demo, and makes its picture in docs/; needs chromium
#   make test-next   tests the newest Keras and TensorFlow, also before their releases
# While working, `make test-fast` runs ruff and the unit tests of the core in less than a minute.
# `make test-all` runs `make test`, and then the campaigns: many further cases of the same.
# With Python 3.13 the tests for MXNet are skipped, because MXNet needs NumPy 1, which ends at 3.12.
.PHONY: demo picture test test-fast test-all test-next campaigns lint docs setup bench clean

PYTHON ?= $(shell for v in 3.11 3.12 3.10 3.13; do \
	python$$v -c '' 2>/dev/null && echo python$$v && break; done || true)
PYTHON := $(if $(PYTHON),$(PYTHON),python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_DEMO := $(VENV)/.ready-demo
DOCS := .venv-docs
READY_DOCS := $(DOCS)/.ready
NEXT := .venv-next
# tests/examples/test_pytorch.py, a campaign, makes it.
TORCH := .venv-torch
# `make test-next NEXT_KERAS=keras` takes the newest release or release candidate instead.
NEXT_KERAS := keras-nightly
READY_NEXT := $(NEXT)/.ready

# What the tests need includes what the demo needs.
demo: $(or $(wildcard $(READY)),$(READY_DEMO))
	$(BIN)/lbbsp demo

CHROMIUM ?= chromium

# Without a sandbox, because root has none, and the page is our own.
picture: demo
	$(CHROMIUM) --headless --no-sandbox --hide-scrollbars --virtual-time-budget=5000 \
		--window-size=1000,1420 --screenshot=docs/demo.png file://$(CURDIR)/runs/demo/demo.html

# Three tests at once keep two cores busy, since many wait for processes. tests/conftest.py says
# which must follow each other, and which start first.
SIDE_BY_SIDE := --numprocesses 3 --no-loadscope-reorder --durations 10

test: lint
	$(BIN)/pytest -m "not campaign" $(SIDE_BY_SIDE)

test-all: test campaigns

campaigns: $(READY)
	$(BIN)/pytest -m campaign $(SIDE_BY_SIDE)

# A release candidate of TensorFlow brings keras-nightly, which overwrites files of keras.
test-next: $(READY_NEXT)
	$(NEXT)/bin/python -m pip install --quiet --upgrade --pre tensorflow-cpu
	$(NEXT)/bin/python -m pip uninstall --quiet --yes keras keras-nightly
	$(NEXT)/bin/python -m pip install --quiet --pre $(NEXT_KERAS)
	$(NEXT)/bin/pytest -m "not campaign" $(SIDE_BY_SIDE) tests/tf tests/parallel

# tests/*.py are checks of the sources themselves, such as imports.
test-fast: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pytest -q -m "not slow and not campaign" --numprocesses 2 tests/core tests/test_*.py \
		lbbsp_core

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Opens as site/index.html. Broken links and anchors, and resources of other servers, are errors.
docs: $(READY_DOCS)
	$(DOCS)/bin/python tools/site_pages.py build/pages
	$(DOCS)/bin/zensical build --clean
	$(DOCS)/bin/python tools/check_site.py site

bench: $(READY)
	$(BIN)/python benchmarks/allocate.py
	$(BIN)/python benchmarks/tables.py all
	$(BIN)/python benchmarks/predictors.py
	$(BIN)/python benchmarks/resources.py
	$(BIN)/python benchmarks/zipline.py
	$(BIN)/python benchmarks/simulate.py
	$(BIN)/python benchmarks/allocator.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/own_time.py
	$(BIN)/python benchmarks/own_time.py tensorflow
	$(BIN)/python benchmarks/own_time.py mxnet
	$(BIN)/python benchmarks/overhead_reliability.py
	$(BIN)/python benchmarks/input_tf.py
	$(BIN)/python benchmarks/overlap.py
	$(BIN)/python benchmarks/overlap.py --balance
	$(BIN)/python benchmarks/overhead_mx.py
	$(BIN)/python benchmarks/schemes_mx.py
	$(BIN)/python benchmarks/unequal_workers.py
	$(BIN)/python benchmarks/unequal_mx.py
	$(BIN)/python benchmarks/work.py
	$(BIN)/python benchmarks/contention.py
	$(BIN)/python benchmarks/driver_windows.py
	$(BIN)/python benchmarks/disturbance.py
	$(BIN)/python benchmarks/sharing.py
	$(BIN)/python benchmarks/sharing.py --channels 80 --steps 50
	$(BIN)/python benchmarks/estimates.py
	$(BIN)/python benchmarks/first_uses.py

setup: $(READY)

$(READY): EXTRAS := tf-cpu,mx,dev
$(READY_DEMO): EXTRAS := tf-cpu,demo
$(READY_DOCS): EXTRAS := docs
$(READY_NEXT): EXTRAS := tf-cpu,dev
$(READY) $(READY_DEMO) $(READY_DOCS) $(READY_NEXT): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || \
		{ echo "lbbsp needs Python 3.10 to 3.13; choose one: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	@echo "Next, pip installs lbbsp[$(EXTRAS)]: up to half a gigabyte, one to six minutes."
	$(@D)/bin/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf $(VENV) $(DOCS) $(NEXT) $(TORCH) site runs build dist *.egg-info
