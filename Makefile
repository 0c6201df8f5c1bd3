# Needs only Python 3.12 or newer. Every target makes what it needs in .venv, once.
#   make test VENV=/tmp/other        another environment        make test ARGS="-k cache"      arguments for the command
#   make test-aot AOT_TPU=/tmp/tpu AOT_GPU=/tmp/gpu     others for the kernels
#   make demo PYTHON=/opt/python3.13/bin/python3                another interpreter

VENV ?= .venv
AOT_TPU ?= .venv-aot
AOT_GPU ?= .venv-aot-gpu
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
.PHONY: help demo test test-aot test-aot-tpu test-aot-gpu aot-tpu aot-gpu lint types format bench dev clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

demo: $(venv)/.demo-installed  ## load a real model, ask about a long document, compare dense and Quest
	"$(BIN)/quest-jax" demo $(ARGS)

test: $(venv)/.dev-installed  ## run all tests but those that need torch
	"$(BIN)/python" -m pytest -m "not parity and not aot" -n 2 --dist worksteal $(ARGS)

test-aot: test-aot-tpu test-aot-gpu  ## compile all kernels for accelerators that are not there

# In environments of their own: where libtpu or the CUDA plugin is installed, JAX looks for the device unless it is told
# not to.
test-aot-tpu:  ## compile the TPU kernels and decode steps for five TPUs that are not there (Linux x86-64)
	@if [ "$$(uname -sm)" = "Linux x86_64" ]; then $(MAKE) --no-print-directory aot-tpu VENV="$(AOT_TPU)"; \
	else echo "SKIPPED: test-aot-tpu: libtpu has wheels for Linux x86-64 only, this is $$(uname -sm)." >&2; fi

test-aot-gpu:  ## compile the GPU kernels and decode steps for five GPUs that are not there (Linux)
	@case "$$(uname -sm)" in \
	"Linux x86_64"|"Linux aarch64") $(MAKE) --no-print-directory aot-gpu VENV="$(AOT_GPU)";; \
	*) echo "SKIPPED: test-aot-gpu: jax-cuda13-plugin has wheels for Linux only, this is $$(uname -sm)." >&2;; esac

aot-tpu: $(venv)/.aot-tpu-installed
	JAX_PLATFORMS=cpu "$(BIN)/python" -m pytest -rs -m aot tests/aot/test_tpu.py -n 2 --dist worksteal $(ARGS)

aot-gpu: $(venv)/.aot-gpu-installed
	JAX_PLATFORMS=cpu "$(BIN)/python" -m pytest -rs -m aot tests/aot/test_gpu.py $(ARGS)

lint: $(venv)/.dev-installed  ## check style and formatting
	"$(BIN)/python" -m ruff check .
	"$(BIN)/python" -m ruff format --check .

types: $(venv)/.dev-installed  ## check types
	"$(BIN)/python" -m pyright --pythonpath "$(BIN)/python"

format: $(venv)/.dev-installed  ## format the code and fix what can be fixed
	"$(BIN)/python" -m ruff check --fix .
	"$(BIN)/python" -m ruff format .

bench: $(venv)/.bench-installed  ## write the tables of docs/performance.md (ARGS=ops: one bench, printed)
ifneq ($(ARGS),)
	"$(BIN)/quest-jax" bench $(ARGS)
else
	mkdir -p build/bench
	$(call bench,decode,decode,--lengths 2048 8192 32768 131072 --plot docs/performance-decode.png)
	$(call bench,decode,decode-bfloat16,--dtype bfloat16 --steps)
	$(call bench,long,long,)
	$(call bench,ops,ops,)
	$(call bench,prefill,prefill,--prompts)
	$(call bench,generate,generate,--lengths 2048 8192 32768)
endif

# The rows go to build/bench, for `quest-jax bench compare`. Torch and llama.cpp take part where they are installed:
# .venv/bin/pip install -e '.[bench]'
bench = "$(BIN)/quest-jax" bench $(1) $(3) --json build/bench/$(2).json --markdown docs/performance.md

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

$(venv)/.bench-installed: pyproject.toml | $(venv)/pyvenv.cfg
	$(call install,cli$(comma)gguf$(comma)plot)
	@touch "$@" "$(VENV)/.demo-installed"

$(venv)/.dev-installed: pyproject.toml | $(venv)/pyvenv.cfg
	$(call install,dev)
	@touch "$@" "$(VENV)/.demo-installed"

$(venv)/.aot-tpu-installed: pyproject.toml | $(venv)/pyvenv.cfg
	$(call install,dev$(comma)tpu)
	@touch "$@"

# The plugin of the JAX that was installed; of the CUDA toolkit only the assembler, not the libraries.
$(venv)/.aot-gpu-installed: pyproject.toml | $(venv)/pyvenv.cfg
	$(call install,dev)
	version=$$("$(BIN)/python" -c 'import importlib.metadata as m; print(m.version("jax"))') && \
	  "$(BIN)/python" -m pip install -qq \
	    "jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version" nvidia-cuda-nvcc
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
