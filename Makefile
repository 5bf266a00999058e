# The front door. Every target works first on a fresh clone: it installs what
# is missing (scripts/setup.sh) and builds what it needs.
#
#   make demo      the main job: trains a small network on every GPU, or where
#                  there is none on CPU replicas
#   make test      all tests, C++ and Python
#   make bench     every benchmark program
#   make lint      format and style checks;  make format  repairs what it can
#   make asan      the C++ tests with address and undefined-behaviour sanitizers
#   make tsan      the C++ tests with the thread sanitizer
#   make fuzz      the reader of checkpoints on damaged files, FUZZ_SECONDS long
#   make compat    compiles everything with the oldest torch supported
#   make wheel     the Python package, in build/wheel/dist
#
# Variables: VENV, an environment to use as it is; BUILD, the build folder;
# JOBS, compile jobs at a time; PRESET, a preset of CMakePresets.json;
# FUZZ_SECONDS, how long `make fuzz` runs.

VENV ?= .venv
PRESET ?= $(if $(CI),ci,dev)
BUILD ?= build/$(PRESET)
JOBS ?= 2

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := test
MAKEFLAGS += --no-print-directory

export CCACHE_SLOPPINESS := pch_defines,time_macros,include_file_mtime,include_file_ctime
export CCACHE_BASEDIR := $(CURDIR)
export CMAKE_CXX_COMPILER_LAUNCHER ?= $(shell command -v ccache)
unexport MAKEFLAGS MFLAGS

PYTHON = $(abspath $(VENV))/bin/python
WHEEL = build/wheel
CTEST = ctest --no-tests=error --output-on-failure --test-dir
cxx_files = find $(wildcard include csrc tests benchmarks) -name '*.h' -o -name '*.cpp'
python_paths = $(wildcard setup.py python tests benchmarks)

# An environment of our own is made once; another is checked every time.
ifeq ($(origin VENV),file)
setup: $(VENV)/.setup-done
$(VENV)/.setup-done: requirements-dev.txt scripts/setup.sh
	scripts/setup.sh $(VENV) requirements-dev.txt own
	touch $@
else
setup:
	scripts/setup.sh "$(VENV)" requirements-dev.txt
endif

# $(call configure,<preset>,<build folder>,<python>)
configure = cmake --preset $(1) -B $(2) -DDATAPARALLEL_PYTHON=$(3) >$(2).configure.log \
	|| { cat $(2).configure.log; exit 1; }

build: setup
	mkdir -p $(BUILD)
	$(call configure,$(PRESET),$(BUILD),$(PYTHON))
	cmake --build $(BUILD) -j $(JOBS)

demo: setup
	mkdir -p $(BUILD)
	$(call configure,$(PRESET),$(BUILD),$(PYTHON))
	cmake --build $(BUILD) -j $(JOBS) --target train
	$(BUILD)/bin/train

test: build wheel
	DATAPARALLEL_TRAIN=$(abspath $(BUILD))/bin/train PYTHONPATH=$(WHEEL)/site \
	$(PYTHON) -m pytest
	$(CTEST) $(BUILD)

bench: build
	cmake --build $(BUILD) --target bench

# With the preset of $(BUILD) and in a folder as deep as build/$(PRESET), so
# that ccache compiles the library once for both.
wheel: setup
	rm -rf $(WHEEL)/dist $(WHEEL)/site
	DATAPARALLEL_BUILD_DIR=$(WHEEL) CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
	CMAKE_ARGS='--preset $(PRESET)' \
	$(PYTHON) -m pip wheel -q . --no-build-isolation --no-deps -w $(WHEEL)/dist
	$(PYTHON) -m pip install -q --no-deps --target $(WHEEL)/site $(WHEEL)/dist/*.whl

lint: setup
	$(cxx_files) | xargs -r clang-format --dry-run -Werror
	$(PYTHON) -m ruff check $(python_paths)
	$(PYTHON) -m ruff format --check $(python_paths)
	bash -n scripts/*.sh .ci/run
	cmake --list-presets >/dev/null

format: setup
	$(cxx_files) | xargs -r clang-format -i
	$(PYTHON) -m ruff check --fix $(python_paths)
	$(PYTHON) -m ruff format $(python_paths)

asan tsan: setup
	mkdir -p build/$@
	$(call configure,$@,build/$@,$(PYTHON))
	cmake --build build/$@ -j $(JOBS)
	$(CTEST) build/$@

FUZZ_SECONDS ?= 60
fuzz: setup
	@command -v clang++ >/dev/null || { echo "fuzz: needs clang and its libFuzzer: apt-get install clang"; exit 1; }
	mkdir -p build/fuzz/corpus build/fuzz/seeds
	$(call configure,fuzz,build/fuzz,$(PYTHON))
	cmake --build build/fuzz -j $(JOBS) --target checkpoint_fuzz
	$(PYTHON) tests/fuzz/make_seeds.py build/fuzz/seeds
	cp tests/data/hostile/* tests/data/checkpoints/* build/fuzz/seeds
	build/fuzz/bin/checkpoint_fuzz -max_total_time=$(FUZZ_SECONDS) -max_len=16384 \
	  -timeout=25 -rss_limit_mb=3000 -malloc_limit_mb=512 \
	  -dict=tests/fuzz/checkpoint.dict -artifact_prefix=build/fuzz/ \
	  build/fuzz/corpus build/fuzz/seeds

compat:
	scripts/setup.sh .venv-compat requirements-compat.txt own
	mkdir -p build/compat
	$(call configure,compat,build/compat,$(abspath .venv-compat)/bin/python)
	cmake --build build/compat -j $(JOBS)
	$(CTEST) build/compat -L smoke

clean:
	rm -rf build

.PHONY: setup build demo test bench wheel lint format asan tsan fuzz compat clean
