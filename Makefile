# `make demo` runs the whole pipeline on the embedded model, `make test` runs all tests. Both first set up .venv in the checkout
# with the pinned versions of requirements.txt.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Compiled modules are kept: else each of the hundreds of processes of a test run compiles the package again.
export PYTHONDONTWRITEBYTECODE :=
APT    := build-essential pkg-config libcurl4-openssl-dev
# Debian's own Python has no venv and no headers; other builds include them.
APT_PY  = $(shell $(PYTHON) tools/debian_packages.py || echo python3 python3-venv python3-dev)
APT_SAFE := clang libclang-rt-14-dev clang-tidy-14 cppcheck
APT_TEST := chromium chromium-sandbox gcc-aarch64-linux-gnu qemu-user libc6-dev-arm64-cross
# In the layout of .clang-format; to format them: clang-format -i FILES.
FORMATTED := $(wildcard csrc/common/*.[ch] csrc/nvfp4/*.[ch] csrc/stream/*.[ch] csrc/gemm/*.[ch] csrc/gemm/*.cu csrc/gemm/*.cuh)
C_FILES := $(shell find csrc setup.py pyproject.toml requirements.txt -type f 2>/dev/null)

.PHONY: demo test test-quick test-thorough lint format perf docs sbom audit clean setup

demo: setup
	$(BIN)/annie-quant demo

# The files in the order of tests/helpers/run_groups.py: longest first.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder

# More workers than processors make tests with servers and clocks late. What fails is run once more, alone, and printed both times:
# what fails again ends `make test`.
test: setup apt-test
	$(BIN)/python -m pytest $(PARALLEL) || { test $$? -eq 1 && echo "== the tests that failed, once more and alone" && \
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none --maxfail 1; }

# Fast files of all packages, for the loop of editing and testing (tests/quick.txt).
test-quick: setup
	$(BIN)/python -m pytest -q $(PARALLEL) --quick

# The randomised files with more cases and new inputs: mutated and hostile files, properties, and kills at random moments.
THOROUGH = tests/checkpoint/test_fuzz.py tests/checkpoint/test_shards.py tests/checkpoint/test_direct.py tests/nvfp4/test_variants.py \
	tests/fuzzing tests/bench/test_kill.py $(shell grep -rl --include=test_*.py "from hypothesis" tests)
test-thorough: setup
	ANNIE_QUANT_FUZZ=20000 ANNIE_QUANT_FUZZ_CASES=1000 ANNIE_QUANT_KILLS=50 $(BIN)/python -m pytest $(PARALLEL) $(THOROUGH)

lint: setup
	$(MAKE) --jobs 2 --output-sync=target lint-python lint-native

.PHONY: lint-python lint-native
lint-python:
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/ruff format --check .
	$(BIN)/python tools/check_imports.py
	$(BIN)/python tools/check_style.py
	$(BIN)/codespell $$(git ls-files)

lint-native:
	@test ! -x $(BIN)/clang-format || $(BIN)/clang-format --dry-run -Werror $(FORMATTED)
	@# not again where setup has compiled with -Werror (.ci/run)
	@test "$$(cat $(STAMP))" = 1 || ANNIE_QUANT_WERROR=1 ANNIE_QUANT_ARCHS=90-virtual $(BIN)/python setup.py -q build_ext --force --parallel 2 --build-temp build/lint --build-lib build/lint

# The measurements that need neither a GPU nor arguments; the others state theirs in their first lines.
PERF := codec gptq nvfp4_decode overhead power report rules runtime stream
perf: setup
	@for name in $(PERF); do echo "== $$name"; $(BIN)/python tests/perf/bench_$$name.py || exit 1; done

# tests/perf/search.md, tests/perf/strategies.md and the README's picture; resumes. ARGS: options of tools/make_measured.py.
.PHONY: measured
measured: setup
	$(BIN)/python tools/make_measured.py $(ARGS)

# The whole line on a real model: fetch, quantize, judge, serve, measure (tests/real/run.py). Resumes. ARGS: options of the script.
MODEL ?= smollm2
.PHONY: real
real: setup
	$(BIN)/python tests/real/run.py $(MODEL) $(ARGS)

# Further checks of the C code and of the readers of untrusted bytes: tests/fuzz/README.md.
.PHONY: asan tsan analyze
asan: setup
	sh tests/sanitize/asan.sh

tsan: setup apt-safe
	sh tests/sanitize/tsan.sh

analyze: setup apt-safe
	sh tests/sanitize/analyze.sh

# SECONDS: time per fuzzer.
SECONDS ?= 60
.PHONY: fuzz fuzz-boundaries
fuzz: setup apt-safe
	$(BIN)/python tests/fuzz/run.py $(SECONDS)

# Grammar-based cases per boundary: what servers answer, checkpoints, templates, run directories, conversations, workloads.
CASES ?= 100000
BOUNDARY ?= all
fuzz-boundaries: setup
	cd tests && PYTHONPATH=..:.:helpers:data:data/dialects ../$(BIN)/python -m fuzz.boundaries.harness $(BOUNDARY) $(CASES)

docs: setup
	$(BIN)/python -m mkdocs build --strict
	@echo "build/site/index.html"

# The source distribution and wheels for x86-64 and aarch64, without a container (docs/packaging.md). ARGS: options of the script.
.PHONY: wheels
wheels:
	@sh .ci/apt $(APT) $(APT_PY) perl gcc-aarch64-linux-gnu libc6-dev-arm64-cross
	$(PYTHON) tools/build_wheels.py dist $(ARGS)

# Bill of materials of a wheel: `make sbom WHEEL=...`; without WHEEL, of one that is built first.
sbom: setup
	test -n "$(WHEEL)" || $(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w build/sbom .
	$(PYTHON) tools/sbom.py $(or $(WHEEL),$$(ls -t build/sbom/*.whl | head -1)) build/sbom/annie-quant.cdx.json

# Known vulnerabilities of the packages in .venv, from PyPI's advisories; a package that cannot be looked up is an error.
audit: setup
	test -x build/audit/bin/pip-audit || { $(PYTHON) -m venv build/audit && build/audit/bin/pip install -q pip-audit==2.10.1; }
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+.*//' >build/audit/installed.txt
	build/audit/bin/pip-audit --strict --no-deps --disable-pip -r build/audit/installed.txt

clean:
	rm -rf build dist .pytest_cache .hypothesis .ruff_cache .mypy_cache runs *.egg-info annie_quant/*.so
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

setup: $(STAMP)

# ALSO: targets that are made while packages are downloaded and the C code is compiled (.ci/run).
$(STAMP): $(C_FILES)
	@sh .ci/apt $(APT) $(APT_PY)
	@# activate is what venv writes last: without it an earlier make was stopped
	@test -f $(BIN)/activate && $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "setuptools>=80" wheel
	$(MAKE) --jobs $(words packages modules $(ALSO)) --output-sync=target packages modules $(ALSO)
	@# without extension modules, which `modules` has compiled
	ANNIE_QUANT_ONLY=none $(BIN)/python -m pip install -q --no-build-isolation --no-deps -e .
	@echo "$(ANNIE_QUANT_WERROR)" >$@

.PHONY: packages modules
# Not compiled: pip would compile 300 MB of sources one after the other, and Python compiles the few that are imported.
packages:
	$(BIN)/python -m pip install -q --no-compile -r requirements.txt

modules:
	$(BIN)/python setup.py -q build_ext --inplace

.PHONY: apt-test
apt-test:
	@sh .ci/apt $(APT_TEST)

.PHONY: apt-safe
apt-safe:
	@sh .ci/apt $(APT_SAFE)
