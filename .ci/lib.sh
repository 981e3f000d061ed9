# Functions of .ci/run and .ci/full: first to run steps, then the steps. Everything happens in a temporary copy of the
# checkout, so that nothing built or installed by hand counts, and nothing is left behind.

set -u
export LC_ALL=C PYTHONNOUSERSITE=1
unset PYTHONPATH VIRTUAL_ENV PYTHONDONTWRITEBYTECODE
python=${PYTHON:-python3}
jobs=$(nproc)
only= # the steps to run, as a regular expression; empty: all
readme_tests=tests/package/test_readme.py

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
tmp=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$tmp"' EXIT
tree=$tmp/tree venv=$tmp/venv tools=$tmp/tools newest=$tmp/newest empty=$tmp/empty
mkdir "$tree" "$empty"
touch "$tmp/skipped" "$tmp/notes" "$tmp/failed"
# Copies the files that git tracks or would track; in an unpacked archive, all files.
git ls-files -z --cached --others --exclude-standard 2>/dev/null >"$tmp/files" || find * -type f -print0 >"$tmp/files"
tar --create --null --files-from="$tmp/files" --ignore-failed-read 2>/dev/null | tar --extract --directory="$tree"
cd "$tree" || exit 1

# step "name" command...: runs the command, and shows its output only if it fails, with the names of failed tests first;
# one step may run beside another. Where $only is set, runs only steps whose names match it; `only= step` is one that
# others need.
step() {
    local name=$1 start=$SECONDS status log
    [[ $name =~ $only ]] || return 0
    [ -z "$only" ] || touch "$tmp/matched"
    shift
    log=$(mktemp "$tmp/log.XXXXXX")
    (set -eo pipefail; "$@") >"$log" 2>&1 </dev/null
    status=$?
    if [ $status = 0 ]; then
        printf 'ok   %4d s  %s\n' $((SECONDS - start)) "$name"
    else
        printf 'FAIL %4d s  %s\n' $((SECONDS - start)) "$name" | tee -a "$tmp/failed"
        (grep -E '^(FAILED|ERROR) ' "$log"
            grep -vE '^(FAILED|ERROR|SKIPPED) |^ *(gcc|clang|cc|copying) ' "$log" | tail -n 60) | sed 's/^/    /'
    fi
}

skip() { echo "skipped: $*" >>"$tmp/skipped"; }

# has "check" command...: whether these commands exist; if one is missing, notes the check as skipped.
has() {
    local check=$1 command
    shift
    for command in "$@"; do
        command -v "$command" >/dev/null || { skip "$check: no $command here"; return 1; }
    done
}

# links "check" compiler flags...: whether a program built with these runs; if not, notes the check as skipped.
links() {
    local check=$1
    shift
    printf '#include <errno.h>\nint main(void) { return errno; }\n' >"$tmp/probe.c"
    "$@" "$tmp/probe.c" -o "$tmp/probe" >/dev/null 2>&1 && "$tmp/probe" >/dev/null 2>&1 && return
    skip "$check: no program built with $* runs here"
    return 1
}

# without pattern: fails if a line of its input matches the pattern, and shows it
without() { if grep -nE "$1"; then return 1; fi; }

finish() {
    echo
    cat "$tmp/skipped" "$tmp/notes"
    if [ -n "$only" ] && [ ! -e "$tmp/matched" ]; then echo "no step is named like $only" >>"$tmp/failed"; fi
    if [ -s "$tmp/failed" ]; then cat "$tmp/failed"; else echo "every step passed, in $SECONDS s"; fi
    [ ! -e "$tmp/pytest" ] || tail -n 40 "$tmp/pytest" | sed -n '/short test summary\|=.* in [0-9.]*s/,$p'
    [ ! -s "$tmp/failed" ]
}

# ---- Python

wheel() { echo "$tmp"/dist/*.whl; }

# oldest package: prints the requirement of the oldest release that pyproject.toml allows
oldest() { sed -n "s/.*\"$1>=\([0-9.]*\)\".*/$1==\1.*/p" pyproject.toml | sort -u; }

# add folder requirement...: adds these to a virtual environment. Python compiles what is imported, when it first is: of
# torch and transformers a sixth.
add() { "$1/bin/pip" install -qq --no-compile "${@:2}"; }

# fresh folder requirement...: makes a virtual environment with these requirements
fresh() {
    "$python" -m venv "$1"
    add "$@"
}

# Installs the wheel, not the sources, so that the core is compiled once.
install() { fresh "$venv" "$(wheel)[test]"; }

# task environment target...: runs a task of the Makefile with the Python of this virtual environment
task() { make --silent PYTHON="$1/bin/python" "${@:2}"; }

# Runs the tests, slow ones too, on the installed package; readme runs README's.
tests() {
    KVCACHE_TEST_INSTALLED=1 task "$venv" test ARGS="--color=no --slow --ignore=$readme_tests" | tee "$tmp/pytest"
}

# build folder: builds the sdist of this tree, and the wheel of the sdist
build() { KVCACHE_WERROR=1 SOURCE_DATE_EPOCH=1000000000 "$tools/bin/python" -m build --outdir "$1"; }

# is_small library bytes: whether a library has fewer bytes without its symbols
is_small() {
    strip "$1" -o "$tmp/stripped"
    [ "$(stat --format %s "$tmp/stripped")" -lt "$2" ]
}

# Checks that the sdist holds every file but hidden ones, and nothing generated; and that the wheel's library is small.
distributions() {
    fresh "$tools" build
    build "$tmp/dist"
    tar --list --file "$tmp"/dist/*.tar.gz | cut -d/ -f2- | sort >"$tmp/sdist"
    without '_core\.c$|\.(so|o|pyc)$|(^|/)\.' <"$tmp/sdist"
    tr '\0' '\n' <"$tmp/files" | sort | comm -23 - "$tmp/sdist" | without '^[^.]'
    "$python" -m zipfile --extract "$(wheel)" "$tmp/unpacked"
    is_small "$tmp/unpacked/kvcache/lib/libkvcache.so" 1150000
}

# Installs the wheel for the tools that check style, types and documentation.
install_tools() {
    add "$tools" "$(wheel)[test,docs,lint]"
    cd "$empty"
    "$tools/bin/python" -c 'import kvcache; kvcache.show_config()'
}

# packages environment: prints the folder of a virtual environment's packages
packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# Adds the tested torch to the tools, what kvcache serve needs, and the oldest transformers that pyproject.toml allows.
# Makes an environment that has the package index's newest release instead, and what else the tools have.
install_torch() {
    add "$tools" --constraint bench/constraints.txt "$(oldest transformers)" "$(wheel)[serve]"
    "$python" -m venv "$newest"
    packages "$tools" >"$(packages "$newest")/tools.pth"
    add "$newest" --upgrade transformers
    local version tested
    version=$("$newest/bin/python" -c 'import importlib.metadata; print(importlib.metadata.version("transformers"))')
    tested=$(sed -n 's/^- transformers \(.*\) are tested.*/\1/p' docs/huggingface.md)
    [[ " $tested " == *" ${version%.*} "* ]] ||
        echo "transformers $version is out: docs/huggingface.md says that $tested are tested" >>"$tmp/notes"
}

# with_torch environment "folders" arguments...: runs the tests in these folders that need torch and transformers, which
# it installs first
with_torch() {
    [ -d "$newest" ] || install_torch
    # Small models gain nothing from more threads, which wait for each other where several processes run.
    OMP_NUM_THREADS=1 "$1/bin/python" -Pm pytest --color=no -n auto -m hf "${@:3}" \
        $(grep -rlE --include='test_*.py' '^torch = |mark\.hf' $2)
}

# Runs README's commands, some of which need torch.
readme() {
    [ -d "$newest" ] || install_torch
    "$tools/bin/pytest" --color=no --slow "$readme_tests"
}

# Runs the installed benchmarks from an empty folder.
installed_benchmarks() {
    cd "$empty"
    "$venv/bin/pytest" --color=no -q -p no:cacheprovider -p kvcache.benchmarks --pyargs kvcache.benchmarks \
        --benchmark-disable --context 128
}

# Fails on paths of somebody's machine, promises of later work, and marks of a merge.  The lines around those that a
# patch changes are another project's.
leftovers() {
    if grep -rnIE --exclude='*.patch' '^[<>]{7} |/(home|root|work|tmp|Users)/[a-z]|\b(TO[D]O|FIX[M]E|XX[X])\b' .; then return 1; fi
}

# ---- C

strict=(-Wall -Wextra -Wpedantic -Wconversion -Werror)

# headers cc c++: compiles each public header alone, and the example in C++
headers() {
    local header
    for header in include/*.h; do
        echo "#include <${header##*/}>" | "$1" -std=c11 "${strict[@]}" -Iinclude -fsyntax-only -x c -
        echo "#include <${header##*/}>" | "$2" -std=c++17 "${strict[@]}" -Iinclude -fsyntax-only -x c++ -
    done
    "$2" -std=c++17 "${strict[@]}" -Iinclude -fsyntax-only examples/cpp/decode.cpp
}

# compile cc flags...: compiles with strict warnings, and keeps nothing
compile() { "$@" -std=c11 -O2 "${strict[@]}" -Iinclude -Isrc -o /dev/null; }

# core cc flags...: compiles the core and the C examples without a warning
core() {
    printf '%s\0' src/*/*.c examples/*.c examples/c/*.c |
        xargs -0 -n 1 -P "$jobs" "$1" -O1 "${@:2}" -std=c11 "${strict[@]}" -Iinclude -Isrc -o /dev/null -c
}

# c_tests cc flags...: runs the tests of the core and of the C examples, built with these flags only; those marked `full`
# where $part is --full, which one optimised build of each kind is for
part=
c_tests() {
    CC=$1 KVCACHE_C_FLAGS="${*:2}" "$venv/bin/pytest" --color=no -n auto $part tests/c tests/examples/test_c_*example.py
}

# sanitizers cc flags...: runs the C tests under the address and undefined-behaviour sanitizers
sanitizers() {
    local name="C tests under address and undefined sanitizers, $*"
    set -- "$@" -O0 -fsanitize=address,undefined -fno-sanitize-recover=all # at -O1 Clang takes minutes over vector code
    if links "$name" "$@"; then step "$name" c_tests "$@"; fi
}

# thread_sanitizer cc: runs the tests of several threads in C under the thread sanitizer; without OpenMP, whose barriers
# it does not see. At -O1 the kernels take ten times as long to compile.
thread_sanitizer() {
    CC=$1 KVCACHE_C_FLAGS='-O0 -fsanitize=thread' "$venv/bin/pytest" --color=no -n auto tests/c tests/world \
        -k 'test_threads or test_prefix_threads or test_restoring or test_waiting or drive_threads'
}

# Writes a program that uses the library.
user_program() {
    cat >main.c <<'END'
#include <kvcache.h>
#include <stdio.h>
int main(void) { return puts(kvc_build_info()) < 0; }
END
}

# Builds and installs with CMake, and runs two of the tests, one with objects of the core of its own; .ci/full runs all.
# Then builds a program that finds the library through CMake and pkg-config. .ci/full optimises the library; in .ci/run
# the wheel's is enough, which a warning ends, too.
cmake_type=Debug
cmake_build() {
    local language prefix=$tmp/prefix
    cmake -S . -B "$tmp/cmake" -DKVCACHE_WERROR=ON -DCMAKE_BUILD_TYPE=$cmake_type -DCMAKE_INSTALL_PREFIX="$prefix" \
        -DCMAKE_INSTALL_LIBDIR=lib
    cmake --build "$tmp/cmake" --parallel "$jobs" --target kvcache kvcache_static generate c_test_faults c_test_sizes
    ctest --test-dir "$tmp/cmake" --output-on-failure --no-tests=error -R '^test_(faults|sizes)$'
    cmake --install "$tmp/cmake"
    cmp LICENSE "$prefix/share/licenses/kvcache/LICENSE"
    mkdir "$tmp/user"
    cd "$tmp/user"
    user_program
    cat >CMakeLists.txt <<'END'
cmake_minimum_required(VERSION 3.21)
project(user ${language})
find_package(kvcache 0.3 REQUIRED)
set_source_files_properties(main.c PROPERTIES LANGUAGE ${language})
foreach(library kvcache kvcache_static)
  add_executable(with_${library} main.c)
  target_link_libraries(with_${library} PRIVATE kvcache::${library})
endforeach()
END
    for language in C CXX; do
        cmake -S . -B $language -Dlanguage=$language -DCMAKE_PREFIX_PATH="$prefix"
        cmake --build $language
        $language/with_kvcache
        $language/with_kvcache_static
    done
    mv "$prefix" "$prefix-moved"
    prefix=$prefix-moved
    export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
    cc main.c -o shared $(pkg-config --cflags --libs kvcache)
    LD_LIBRARY_PATH=$prefix/lib ./shared
    cc main.c -o static $(pkg-config --cflags kvcache) "$prefix/lib/libkvcache.a" $(pkg-config --static --libs kvcache |
        sed 's/-lkvcache//')
    ./static
    # The shared library exports public names only, and needs only these libraries.
    nm --dynamic --defined-only "$prefix/lib/libkvcache.so" | without ' [A-Z] ([^k]|k[^v]|kv[^c]|kvc[^_])'
    readelf --dynamic "$prefix/lib/libkvcache.so" |
        sed -E '/NEEDED/!d; /\[(lib(c|m|pthread|gomp|omp)\.|ld-)/d' | without .
    [ $cmake_type = Debug ] || is_small "$prefix/lib/libkvcache.so" 1100000
}

# Builds the library as a part of another project's CMake build.
cmake_part() {
    mkdir "$tmp/part"
    cd "$tmp/part"
    user_program
    cat >CMakeLists.txt <<END
cmake_minimum_required(VERSION 3.21)
project(whole C)
include(FetchContent)
FetchContent_Declare(kvcache SOURCE_DIR "$tree")
FetchContent_MakeAvailable(kvcache)
add_executable(whole main.c)
target_link_libraries(whole PRIVATE kvcache::kvcache_static)
install(TARGETS whole)
END
    cmake -S . -B build -DCMAKE_BUILD_TYPE=Debug -DCMAKE_INSTALL_PREFIX="$tmp/part/prefix"
    cmake --build build --parallel "$jobs" --target whole
    build/whole
    cmake --install build
    find prefix -type f | sed '\|^prefix/bin/whole$|d' | without .
}

source integrations/llama.cpp/ci.sh

# ---- the checks that every change must pass

usual() {
    step "no leftovers" leftovers
    compiled & # what makes and installs the wheel waits at times
    only= step "sdist and wheel" distributions
    only= step "install the wheel with [test]" install &
    local installing=$!
    only= step "install the wheel with [test,docs,lint]" install_tools
    wait $installing
    command -v valkey-server >/dev/null || has "stores in Valkey or Redis" redis-server
    has "stores with TLS" openssl
    # Some of it waits, and so do some of the steps that go on beside it.
    step "pytest on the installed package" tests &
    step "ruff, cython-lint, clang-format" task "$tools" style
    step "mypy --strict, stubtest" task "$tools" types
    step "docs without a warning, links within them" task "$tools" docs DOCS="$tmp/html"
    step "pytest with torch and the newest transformers" with_torch "$newest" tests
    # .ci/full runs all with both.
    step "tests of models with the oldest transformers" with_torch "$tools" \
        "$(echo tests/hf/test_{hf,decode,enabling,engine,every_model,recurrent}.py)"
    step "README's commands" readme & # one process, which often waits for pip
    compiled_for_tests
    wait
    step "benchmarks, installed, once each" installed_benchmarks
    llama_tests
}

# Compiles the core without a warning, and builds it with CMake.
compiled() {
    local cc cxx
    local -A quickly=([gcc]=-fsyntax-only [clang]=-O0) # without optimisation GCC's headers warn
    for cc in gcc clang; do
        cxx=${cc/gcc/g++} cxx=${cxx/clang/clang++}
        has "$cc" "$cc" || continue
        has "header as C++, $cxx" "$cxx" && step "header as C11 and C++17, example in C++, $cc" headers "$cc" "$cxx"
        # Optimised it takes many times as long; the wheel and CMake's library are, and a warning ends their builds.
        step "core without a warning, $cc" core "$cc" "${quickly[$cc]}"
    done
    if has "CMake build" cmake pkg-config; then # before && Bash would not end a step at its first failure
        step "CMake build, install, use" cmake_build
        step "CMake build as a part of another" cmake_part
    fi
}

# Runs the tests of threads under the thread sanitizer, and compiles the adapter of llama.cpp.
compiled_for_tests() {
    # pytest runs the C tests under the sanitizers, where they work; .ci/full also without optimisation.
    links "C tests under address and undefined sanitizers" "${CC:-cc}" -fsanitize=address,undefined
    if links "C tests of threads under the thread sanitizer" "${CC:-cc}" -fsanitize=thread; then
        step "C tests of threads under the thread sanitizer" thread_sanitizer "${CC:-cc}"
    fi
    llama_compiled
}
