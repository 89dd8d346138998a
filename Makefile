# `make demo` and `make test` each set up all they need in .venv; neither needs a GPU.
PYTHON ?= python3
PYTEST_WORKERS ?= 3

# Relative paths throughout, so that a checkout under a path with spaces works.
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.railwave-installed
TESTED := requirements-tested.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# 3.11 is what the tested versions ask for; the package itself allows 3.10.
PYTHON_OK := import sys; sys.exit(sys.version_info < (3, 11))
# Whole only if pip's own file list is there: venv writes it last.
VENV_OK := import importlib.metadata as m, sys, pip; sys.exit(not ( \
	sys.version_info >= (3, 11) and sys.prefix != sys.base_prefix and m.files("pip")))

.DEFAULT_GOAL := help
.PHONY: help setup demo test soak test-gpu test-versions docs lint format clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile
	@echo "PYTHON ($(PYTHON)) makes .venv; PYTEST_WORKERS ($(PYTEST_WORKERS)) runs the tests."

setup: $(STAMP) ## Make .venv and install railwave with the tested versions

demo: $(STAMP) ## Dispatch and combine on every path, checked against a dense reference
	$(VENV)/bin/railwave demo

test: $(STAMP) ## Run the tests
	$(VENV)/bin/pytest -n $(PYTEST_WORKERS) --dist worksteal

soak: $(STAMP) ## Run the tests that take minutes
	RAILWAVE_TEST_SLACK_S=0 $(VENV)/bin/pytest -m '' tests/test_process_faults.py
	$(VENV)/bin/pytest -m soak --ignore=tests/test_process_faults.py

# Where offline, wheels in .whl/ give what the Python at hand lacks (nvshmem4py).
GPU_SITE := .whl/site
GPU_ENV = PYTHONPATH=$(CURDIR):$(CURDIR)/$(GPU_SITE) OMP_NUM_THREADS=1 \
	NVSHMEM_REMOTE_TRANSPORT=none NVSHMEM_DISABLE_NVLS=1 \
	NVSHMEM_IGNORE_CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=1
SHARD ?= 1 2 3 4

test-gpu: ## Run the tests that need a GPU, with the Python at hand (SHARD=1, 2, 3: a part; 4: one PE per GPU)
	@$(GPU_ENV) $(PYTHON) -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || { \
		echo "make: '$(PYTHON)' has no torch that finds a GPU; name one: make test-gpu PYTHON=..." \
			>&2; exit 1; }
	@if ls .whl/*.whl >/dev/null 2>&1; then $(PYTHON) -m pip install --quiet --no-index --no-deps \
		--no-compile --upgrade --target $(GPU_SITE) .whl/*.whl; fi
	@for shard in $(SHARD); do case $$shard in \
		1) $(GPU_ENV) RAILWAVE_TEST_DEVICE=cuda timeout 480 $(PYTHON) -m pytest -n 12 \
			tests/test_kernels_plan.py tests/test_kernels_move.py tests/test_kernels_combine.py \
			tests/test_kernels_port.py tests/test_world_results.py tests/test_world_waves.py tests/test_static.py \
			tests/test_autograd.py tests/test_extras.py tests/test_kernels_group.py && \
			$(GPU_ENV) RAILWAVE_TEST_DEVICE=cuda timeout 480 $(PYTHON) -m pytest -n 12 \
			-m 'not gpu' tests/test_grouped.py ;; \
		2) $(GPU_ENV) timeout 480 $(PYTHON) -m bench.mps $(PYTHON) -m pytest -m gpu \
			-k "not full_size and not one_per_gpu" \
			tests/test_gpu.py ;; \
		3) $(GPU_ENV) timeout 480 $(PYTHON) -m bench.mps $(PYTHON) -m pytest -m gpu -k full_size \
			tests/test_gpu.py ;; \
		4) $(GPU_ENV) NCCL_NVLS_ENABLE=0 timeout 480 $(PYTHON) -m pytest -rs -m gpu \
			-k one_per_gpu tests/test_gpu.py ;; \
		esac || exit; done

TRITONS ?= 3.6.0 3.7.1 3.8.0 3.9.0

test-versions: $(STAMP) ## Run the kernel tests with every triton that railwave supports
	@for version in $(TRITONS); do echo "triton $$version"; \
		$(PY) -m pip install --quiet --no-deps --upgrade --target $(VENV)/triton-$$version \
			triton==$$version && \
		PYTHONPATH=$(CURDIR)/$(VENV)/triton-$$version $(VENV)/bin/pytest -n $(PYTEST_WORKERS) -m 'not gpu' \
			tests/test_kernels_plan.py tests/test_kernels_move.py tests/test_kernels_combine.py \
			tests/test_kernels_compile.py tests/test_kernels_resources.py || exit; done

docs: $(STAMP) ## Build the site into docs/_build/html; a warning is an error
	$(PY) -m sphinx -W --keep-going -b html docs docs/_build/html

lint: $(STAMP) ## Check style and format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(STAMP) ## Mend style and format
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean: ## Remove build outputs and caches; .venv stays
	rm -rf build dist docs/_build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -path ./.git -prune -o \
		-type d -name __pycache__ -exec rm -rf {} +

# The stamp comes last: an interrupted set-up goes on at the next call.
$(STAMP): $(TESTED) pyproject.toml
	@if ! $(PY) -c '$(VENV_OK)' 2>/dev/null; then \
		command -v "$(PYTHON)" >/dev/null || { \
			echo "make: no '$(PYTHON)' here; name a Python 3.11 or newer: make PYTHON=python3.11" >&2; \
			exit 1; }; \
		"$(PYTHON)" -c '$(PYTHON_OK)' || { \
			echo "make: the tested versions need Python 3.11 or newer, but '$(PYTHON)' is" \
				"$$("$(PYTHON)" -V 2>&1); try: make PYTHON=python3.11" >&2; \
			exit 1; }; \
		"$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || { \
			echo "make: '$(PYTHON)' lacks venv or ensurepip; on Debian and Ubuntu:" \
				"apt-get install python3-venv" >&2; \
			exit 1; }; \
		echo "Making $(VENV)"; \
		"$(PYTHON)" -m venv --clear $(VENV); \
	fi
	@echo "Installing the versions of $(TESTED) into $(VENV): a few minutes the first time"
	@# torch alone first: a CUDA build's exact pin on triton would rule out the tested triton.
	@$(PY) -m pip install "$$(grep '^torch==' $(TESTED))"
	@grep -v '^torch==' $(TESTED) | $(PY) -m pip install --quiet --requirement /dev/stdin
	@# compat: a plain path entry, which a folder named railwave beside a script can't hide.
	@$(PY) -m pip install --quiet --no-deps --no-build-isolation \
		--config-settings editable_mode=compat --editable .
	@touch $@
