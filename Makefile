# A developer's tasks, which .ci/run runs too. Each uses the kvcache that is installed for $(PYTHON), with its tools.
PYTHON ?= $(or $(wildcard .venv/bin/python),python3)
export PATH := $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$(PATH)
export PYTHONSAFEPATH = 1 # or the sources in this folder would hide what is installed

.PHONY: help install test ctest lint style types analyse analyse-clang-tidy analyse-cppcheck analyse-gcc check bench docs
help:
	@echo 'make install   install this checkout for $(PYTHON), with all that the other tasks need;'
	@echo '               repeat it after a change to C or Cython'
	@echo 'make test      run the tests; ARGS="-k window" picks some'
	@echo 'make ctest     run the tests in C alone'
	@echo 'make lint      check style (ruff, cython-lint, clang-format) and types (mypy, stubtest)'
	@echo 'make analyse   look for defects in C without running it (clang-tidy, cppcheck, gcc -fanalyzer)'
	@echo 'make check     run everything that a change must pass'
	@echo 'make bench     run the benchmarks (minutes)'
	@echo 'make docs      build the documentation into $(DOCS)'
	@echo 'PYTHON=python3.12 picks another Python.'

install:
	$(PYTHON) -m pip install -c bench/constraints.txt -e '.[dev,bench]'

test:
	pytest -n auto $(ARGS)

ctest:
	pytest -n auto tests/c $(ARGS)

lint: style types

style:
	ruff check
	ruff format --check
	cython-lint kvcache
	clang-format --dry-run -Werror src/*/*.[ch] examples/*.c examples/c/*.[ch] examples/cpp/*.[ch]pp \
		integrations/*/*.[ch] integrations/*/*/*.[ch] integrations/*/*/*.cpp

types:
	mypy --strict kvcache
	stubtest --concise --mypy-config-file pyproject.toml --allowlist .ci/stubtest.txt --ignore-unused-allowlist \
		kvcache

# Kernels are left out: they allocate nothing, and each is tested against the scalar one.
ANALYSED = $(filter-out src/kernels/%,$(wildcard src/*/*.c)) $(wildcard examples/*.c examples/c/*.c)
C11 = -std=c11 -Iinclude -Isrc
analyse: analyse-clang-tidy analyse-cppcheck analyse-gcc

analyse-clang-tidy:
	printf '%s\0' $(ANALYSED) | xargs -0 -P "$$(nproc)" -I {} clang-tidy --quiet {} -- $(C11)

analyse-cppcheck:
	cppcheck --quiet --error-exitcode=1 --enable=warning,portability --inline-suppr -j "$$(nproc)" --std=c11 \
		-Iinclude -Isrc $(ANALYSED)

# What dereferences NULL only if a function of another file breaks its contract is left out, and what .ci/gcc.txt lists.
analyse-gcc:
	! for file in $(ANALYSED); do \
		gcc -fanalyzer -Wno-analyzer-null-dereference -Wno-analyzer-null-argument $(C11) -c -o /dev/null $$file; \
	done 2>&1 | grep -E ' (warning|error): ' | grep -vf .ci/gcc.txt

check:
	bash .ci/run

bench:
	pytest bench $(ARGS)

DOCS = docs/_build
docs:
	sphinx-build -W --keep-going -q docs $(DOCS)
