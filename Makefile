# Every target sets up .venv by itself; only Python 3.11 or newer, pip and make are needed (a C++ compiler helps).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

NATIVE := $(wildcard headgate/ops/native/*.cpp headgate/ops/native/*.h)

.PHONY: demo test test-gpu lint sanitize instrument wheels docs clean
.DELETE_ON_ERROR:

$(READY): pyproject.toml setup.py constraints.txt headgate/version.py $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt pip setuptools
	$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e ".[dev]"
	touch $@

# What attention is worth, what a window keeps and what it forgets, on bytes and on a recall task: minutes on two
# cores. The variants are the controls themselves, so text needs no others.
DEMO := runs/demo
RECALL_TASK := recall:context=128,pairs=8,queries=8,keys=8,values=4,noise=4,sequences=8000,joined=true
demo: $(READY)
	$(BIN)/headgate prepare stdlib $(DEMO)/text-data --tokenizer byte --max-tokens 4000000
	$(BIN)/headgate prepare $(RECALL_TASK) $(DEMO)/recall-data
	$(BIN)/headgate compare "local:window=16@window of 16" "local:window=0@no attention" \
		--recipe examples/demo/recall.json --data $(DEMO)/recall-data --out $(DEMO)/recall --no-cost \
		train.document_tokens=16384
	$(BIN)/headgate compare "local:window=32@window of 32" "local:window=0@no attention" \
		--recipe examples/demo/text.json --data $(DEMO)/text-data --out $(DEMO)/text --lengths 256,1024 --cost-seconds 0.3 \
		--no-controls train.document_tokens=65536
	$(BIN)/python examples/demo/closing.py $(DEMO)

include studies/first/study.mk studies/second/study.mk studies/tasks/study.mk

# A worker a core; `make test TESTS="tests/ops -k window"` runs a part. Hundreds of Python processes start in it:
# without compiled modules kept on disk, whatever the environment says, each would compile the package again.
TESTS ?=
test: $(READY)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n logical --dist worksteal $(TESTS)

# For a machine with a GPU: everything tried and timed within ten minutes. Writes gpu-report.md, one page, and
# gpu-report.json. Without a GPU it says so and ends with code 2.
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

# What a release consists of, in dist/: a wheel with kernels for this machine's processor that needs no compiler, one
# without kernels for all others, and the sources. docs/releasing.md says what to check.
wheels: $(READY)
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheels .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheels/*linux*.whl
	rm -rf build
	HEADGATE_PURE=1 $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	rm -rf build
	$(BIN)/python -m build --quiet --sdist --no-isolation --outdir dist .
	ls -l dist

# The pages of docs/ as a site, in site/; a warning is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) build dist site *.egg-info headgate/ops/native/*.so headgate/ops/native/build.txt
