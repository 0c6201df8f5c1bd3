# Needs only Python 3.12 or newer. Every target makes what it needs in .venv, once.
#   make test VENV=/tmp/other        another environment        make test ARGS="-k cache"      arguments for the command
#   make demo PYTHON=/opt/python3.13/bin/python3                another interpreter

VENV ?= .venv
PYTHON ?=
ARGS ?=
BIN = $(VENV)/bin

# Targets and prerequisites need the blanks of a path escaped; recipes quote it.
empty :=
comma := ,
venv := $(subst $(empty) ,\ ,$(VENV))

export PIP_DISABLE_PIP_VERSION_CHECK = 1
# A package folder of another project must not leak into this environment.
unexport PYTHONHOME
unexport PYTHONPATH

.DEFAULT_GOAL := help
.PHONY: help demo test test-aot test-aot-tpu test-aot-gpu aot-tpu lint types format bench dev clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

demo: $(venv)/.demo-installed  ## load a real model, ask about a long document, compare dense and Quest
	"$(BIN)/quest-jax" demo $(ARGS)

test: $(venv)/.dev-installed  ## run all tests but those that need torch
	"$(BIN)/python" -m pytest -m "not parity and not aot" -n 2 --dist worksteal $(ARGS)

test-aot: test-aot-tpu test-aot-gpu  ## compile all kernels for accelerators that are not there

# In an environment of its own: where libtpu is installed, JAX looks for a TPU unless it is told not to.
test-aot-tpu:  ## compile the TPU kernels and a decode step for TPUs that are not there
	@if [ "$$(uname -sm)" = "Linux x86_64" ]; then $(MAKE) --no-print-directory aot-tpu VENV=.venv-aot; \
	else echo "SKIPPED: test-aot-tpu: libtpu has wheels for Linux x86-64 only, this is $$(uname -sm)." >&2; fi

aot-tpu: $(venv)/.aot-tpu-installed
	JAX_PLATFORMS=cpu "$(BIN)/python" -m pytest -rs -m aot tests/aot/test_tpu.py $(ARGS)

# An environment of its own: an installed CUDA plugin looks for its device whenever JAX starts without JAX_PLATFORMS.
test-aot-gpu:  ## compile the GPU kernels for five architectures, without a GPU (Linux)
ifeq ($(shell uname -s),Linux)
	@$(MAKE) --no-print-directory .venv-aot-gpu/.aot-gpu-installed VENV=.venv-aot-gpu
	JAX_PLATFORMS=cpu .venv-aot-gpu/bin/python -m pytest -m aot tests/aot/test_gpu.py $(ARGS)
else
	@echo 'NOT TESTED: the GPU programs were not compiled, jax-cuda13-plugin has no wheel for this platform' >&2
endif

# The plugin of the JAX that was installed; of the CUDA toolkit only the assembler, not the libraries.
.venv-aot-gpu/.aot-gpu-installed: .venv-aot-gpu/.dev-installed
	version=$$(.venv-aot-gpu/bin/python -c 'import importlib.metadata as m; print(m.version("jax"))') && \
	  .venv-aot-gpu/bin/python -m pip install -qq \
	    "jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version" nvidia-cuda-nvcc
	@touch "$@"

lint: $(venv)/.dev-installed  ## check style and formatting
	"$(BIN)/python" -m ruff check .
	"$(BIN)/python" -m ruff format --check .

types: $(venv)/.dev-installed  ## check types
	"$(BIN)/python" -m pyright --pythonpath "$(BIN)/python"

format: $(venv)/.dev-installed  ## format the code and fix what can be fixed
	"$(BIN)/python" -m ruff check --fix .
	"$(BIN)/python" -m ruff format .

bench: $(venv)/.demo-installed  ## time a decode step, dense and Quest (ARGS=prefill: a prompt, dense and QuoKA)
	"$(BIN)/quest-jax" bench $(or $(ARGS),decode)

dev: $(venv)/.dev-installed  ## make the environment for development, run nothing

clean:  ## remove .venv and everything built
	rm -rf .venv .venv-aot .venv-aot-gpu build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment made by something else than the rule below (uv) may have no pip yet.
define install
	@echo "Installing quest-jax[$(1)] and what it needs into $(VENV)"
	@"$(BIN)/python" -m pip --version > /dev/null 2>&1 || "$(BIN)/python" -m ensurepip > /dev/null
	@"$(BIN)/python" -m pip install -qq -e '.[$(1)]'
endef

# A stamp says "installed"; it is older than pyproject.toml when the dependencies may have changed.
$(venv)/.demo-installed: pyproject.toml | $(venv)/pyvenv.cfg
	$(call install,cli$(comma)gguf)
	@touch "$@"

$(venv)/.dev-installed: pyproject.toml | $(venv)/pyvenv.cfg
	$(call install,dev)
	@touch "$@" "$(VENV)/.demo-installed"

$(venv)/.aot-tpu-installed: pyproject.toml | $(venv)/pyvenv.cfg
	$(call install,dev$(comma)tpu)
	@touch "$@"

# A candidate must run, not merely be on the path: shims of version managers exist for versions they cannot start.
$(venv)/pyvenv.cfg:
	@for python in $(if $(PYTHON),"$(PYTHON)",python3.12 python3.13 python3.14 python3 python \
	    "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3); do \
	  if "$$python" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then \
	    echo "$$python -m venv $(VENV)"; exec "$$python" -m venv "$(VENV)"; \
	  fi; \
	done; \
	echo 'Expected Python 3.12 or newer with its venv module, found none$(if $(PYTHON), at PYTHON=$(PYTHON)).' >&2; \
	echo 'Install one (on Debian and Ubuntu python3-venv too) or name it: make demo PYTHON=/path/to/python3.12' >&2; \
	exit 1
