# Every target sets up .venv by itself; only Python 3.11 or newer, pip and make are needed (a C++ compiler helps).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

NATIVE := $(wildcard headgate/ops/native/*.cpp headgate/ops/native/*.h)

.PHONY: demo test test-gpu lint sanitize instrument clean
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
		train.evaluate_tokens=2048 train.document_tokens=16384

include studies/first/study.mk

# A worker a core; `make test TESTS="tests/ops -k window"` runs a part.
TESTS ?=
test: $(READY)
	$(BIN)/python -m pytest -n logical --dist worksteal $(TESTS)

# For a machine with a GPU: the contract on the device, then times against other attentions. Writes
# gpu-report.json and gpu-report.md. Without a GPU it says so and ends with code 2.
test-gpu: $(READY)
	$(BIN)/python benchmarks/gpu.py

# Studies whose answer is known, and simulated ones: does the instrument measure what it says?
instrument: $(READY)
	$(BIN)/python benchmarks/instrument.py --out runs/instrument

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
