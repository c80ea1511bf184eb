# Every target sets up .venv by itself; only Python 3.11 or newer, pip and make are needed (a C++ compiler helps).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

NATIVE := $(wildcard headgate/ops/native/*.cpp headgate/ops/native/*.h)

.PHONY: demo study study-text study-late study-start study-recall study-long test test-gpu lint sanitize clean
.DELETE_ON_ERROR:

$(READY): pyproject.toml setup.py constraints.txt headgate/version.py $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt pip setuptools
	$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e ".[dev]"
	touch $@

# Fewer tokens than the recipe's, so that fifteen runs take minutes on two cores: it shows how, not which is better.
DEMO := runs/demo
demo: $(READY)
	$(BIN)/headgate prepare stdlib $(DEMO)/data
	$(BIN)/headgate compare --recipe tiny --data $(DEMO)/data --out $(DEMO)/study --seeds 3 --lengths 512 \
		--cost-seconds 0.3 train.steps=32 train.batch_size=4 train.warmup_steps=4 train.evaluate_every=4 \
		train.evaluate_tokens=2048

# The study of docs/findings.md: about three hours on two cores; stopped, it goes on with the same command. TEXT is web
# text, NOVELS long documents: files, folders or addresses that `headgate prepare` takes.
STUDY := runs/study
TEXT ?= hf://datasets/HuggingFaceFW/fineweb/sample/10BT
NOVELS ?= $(TEXT)
SEEDS ?= 5
LONG_SEEDS ?= 3
SETTINGS ?=
TOKENS := --tokenizer bpe:2048 --max-tokens 6000000
RECALL := recall:context=256,pairs=8,queries=8,keys=8,values=4,noise=4,sequences=10000,joined=true
PAPERS := dynamic-sparse head-gated context-adaptive sparse-geometric
MECHANISMS ?= $(PAPERS) near-far sparse-geometric:gate=log local combiner positional local:window=0
ABLATIONS ?= dynamic-sparse:no-gate dynamic-sparse:fixed-window dynamic-sparse:no-window \
	head-gated:no-gate head-gated:local-only head-gated:global-only \
	context-adaptive:no-gate context-adaptive:local-only context-adaptive:global-only context-adaptive:fixed-width \
	sparse-geometric:no-geometric sparse-geometric:fixed-pattern sparse-geometric:neither \
	near-far:no-gate near-far:constant-gate near-far:half-open near-far:near-only near-far:gate=constant,window=1024
# Of recall alone: far heads that reach half of its context.
SHORT_REACH ?= near-far:stretch=4
study: study-text study-recall study-start study-long

# Loss at equal tokens, and cost, of every mechanism and ablation.
study-text: $(READY)
	$(BIN)/headgate prepare "$(TEXT)" $(STUDY)/text-data $(TOKENS)
	$(BIN)/headgate compare $(MECHANISMS) $(ABLATIONS) --recipe study --data $(STUDY)/text-data \
		--out $(STUDY)/text --seeds $(SEEDS) --lengths 1024 --cost-seconds 0.3 $(SETTINGS)

# Four times the tokens, at which attention pays by itself; not a part of `make study`: another hour.
study-late: $(READY)
	$(BIN)/headgate prepare "$(TEXT)" $(STUDY)/text-data $(TOKENS)
	$(BIN)/headgate compare near-far local:window=0 dynamic-sparse head-gated near-far:gate=constant,window=1024 \
		near-far:constant-gate near-far:near-only --recipe study \
		--data $(STUDY)/text-data --out $(STUDY)/late --seeds 4 --no-cost \
		train.steps=1000 train.warmup_steps=100 train.evaluate_every=100 $(SETTINGS)

# The same from a start that suits plain attention: embeddings that are large beside what attention adds to them.
study-start: $(READY)
	$(BIN)/headgate prepare "$(TEXT)" $(STUDY)/text-data $(TOKENS)
	$(BIN)/headgate compare dynamic-sparse near-far local:window=0 --recipe study \
		--data $(STUDY)/text-data --out $(STUDY)/start --seeds $(SEEDS) --no-cost \
		model.tied_embeddings=false model.embedding_deviation=1 $(SETTINGS)

# What each can recall, by distance.
study-recall: $(READY)
	$(BIN)/headgate prepare $(RECALL) $(STUDY)/recall-data
	$(BIN)/headgate compare $(MECHANISMS) $(ABLATIONS) $(SHORT_REACH) --recipe study-recall --data $(STUDY)/recall-data \
		--out $(STUDY)/recall --seeds $(SEEDS) --no-cost $(SETTINGS)

# Long documents at equal seconds, not tokens.
study-long: $(READY)
	$(BIN)/headgate prepare "$(NOVELS)" $(STUDY)/long-data $(TOKENS)
	$(BIN)/headgate compare dynamic-sparse local head-gated context-adaptive:select=block near-far --recipe study \
		--data $(STUDY)/long-data --out $(STUDY)/long --seeds $(LONG_SEEDS) --budget seconds --no-cost \
		train.context=8192 train.steps=24 train.warmup_steps=3 train.evaluate_every=12 train.evaluate_tokens=65536 \
		$(SETTINGS)

# A worker a core; `make test TESTS="tests/ops -k window"` runs a part.
TESTS ?=
test: $(READY)
	$(BIN)/python -m pytest -n logical --dist worksteal $(TESTS)

# For a machine with a GPU: the contract on the device, then times against other attentions. Writes
# gpu-report.json and gpu-report.md. Without a GPU it says so and ends with code 2.
test-gpu: $(READY)
	$(BIN)/python benchmarks/gpu.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The kernels under the address and undefined-behaviour sanitizers, over the shapes of the op tests. Python itself
# leaks by design, and torch's own libraries are not instrumented, so leaks are not looked for.
# libstdc++ comes with it, since the sanitizer looks for it before torch loads it, and torch throws exceptions.
sanitize: $(READY)
	HEADGATE_SANITIZE=1 $(BIN)/python setup.py --quiet build_ext --inplace
	HEADGATE_NATIVE=sanitize ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so)" \
		$(BIN)/python -m pytest tests/ops -m "not compiles"

clean:
	rm -rf $(VENV) build *.egg-info headgate/ops/native/*.so headgate/ops/native/build.txt
