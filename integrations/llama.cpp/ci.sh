# llama.cpp on this cache: steps of .ci/run and .ci/full, whose .ci/lib.sh reads this file.

export KVCACHE_LLAMA_CPP= # tests run no llama.cpp but the one that with_llama builds
llama=integrations/llama.cpp
kept=${XDG_CACHE_HOME:-$HOME/.cache}/kvcache/llama.cpp/ci # builds stay here

# llama_sources "check": unpacks and patches llama.cpp's sources; if they cannot be had, notes the check as skipped.
llama_sources() {
    local prepare=(env PYTHON="$tools/bin/python" $llama/build.sh --prepare --output "$tmp/llama")
    has "$1" patch || return
    "${prepare[@]}" >"$tmp/prepare" 2>&1 && return
    if grep -q 'pip could not get\|has no pip' "$tmp/prepare"; then
        skip "$1: pip cannot get llama.cpp's sources here"
    else
        step "llama.cpp's sources, patched" "${prepare[@]}"
    fi
    return 1
}

# adapter c++: compiles the adapter and its tests with llama.cpp's headers, without a warning of those that llama.cpp
# asks for; build.sh asks for none
adapter() {
    local headers=("$tmp"/llama/source/{include,src,common,vendor,ggml/include,ggml/src})
    printf '%s\0' $llama/{src,tests}/*.cpp | xargs -0 -n 1 -P "$jobs" "$1" -std=c++17 -fsyntax-only -Wall -Wextra \
        -Wpedantic -Wcast-qual -Wmissing-declarations -Wextra-semi -Werror -Iinclude -I$llama/src \
        "${headers[@]/#/-isystem}"
}

# Brings $kept/tree up to date with this tree. Only files that differ get a new time, and are compiled again.
keep_tree() {
    local file
    mkdir -p "$kept/tree"
    find CMakeLists.txt include integrations src -type f | while read -r file; do
        cmp -s "$file" "$kept/tree/$file" && continue
        mkdir -p "$(dirname "$kept/tree/$file")"
        cp "$file" "$kept/tree/$file"
    done
    (cd "$kept/tree" && find . -type f) | while read -r file; do [ -e "$file" ] || rm "$kept/tree/$file"; done
}

# with_llama folder "pytest arguments" options...: builds llama.cpp with these options, or what has changed of it, in a
# folder that stays, and runs tests on it
with_llama() {
    mkdir -p "$kept"
    exec 8>"$kept/lock"
    flock 8
    keep_tree
    local options=(--tests --output "$kept/$1" "${@:3}")
    if pkg-config --exists hiredis 2>/dev/null; then options+=(--valkey); fi
    PYTHON=$tools/bin/python "$kept/tree/$llama/build.sh" "${options[@]}"
    KVCACHE_LLAMA_CPP=$kept/$1 "$venv/bin/pytest" --color=no $2 $llama
}

# Runs the benchmarks and the binding, which need the package that the sources come from.
llama_in_python() {
    add "$tools" --constraint bench/constraints.txt "$(wheel)[bench]"
    CMAKE_ARGS=-DLLAMA_BUILD=OFF "$tools/bin/pip" install -qq "$(sed 's/ .*//' $llama/pin.txt)"
    KVCACHE_LLAMA_CPP=$kept/shared-openmp "$tools/bin/pytest" --color=no $llama/tests/test_{bench,python}.py
}

# ---- the steps of .ci/run

llama_compiled() {
    if has "adapter of llama.cpp" g++ && llama_sources "adapter of llama.cpp"; then
        step "adapter of llama.cpp without a warning, g++" adapter g++
    fi
}

llama_tests() {
    if [ ! -e "$kept/shared-openmp/kvcache.sha256" ]; then
        skip "pytest on llama.cpp: it was not built here; .ci/full does"
    elif has "pytest on llama.cpp" cmake flock patch; then
        step "pytest on llama.cpp" with_llama shared-openmp ''
    fi
}

# ---- the steps of .ci/full

llama_all_tests() {
    if has "llama.cpp on this cache" cmake flock patch c++ && llama_sources "llama.cpp on this cache"; then
        has "adapter of llama.cpp, clang++" clang++ && step "adapter of llama.cpp without a warning, clang++" adapter clang++
        step "llama.cpp, all tests" with_llama shared-openmp --slow
        step "llama.cpp from Python" llama_in_python
        step "llama.cpp, static, on its own threads" with_llama static-own '' --static --own-threads
        if links "llama.cpp under the address sanitizer" c++ -fsanitize=address,undefined; then
            step "llama.cpp under the address sanitizer" with_llama address '' --sanitize address
        fi
        if links "llama.cpp under the thread sanitizer" c++ -fsanitize=thread; then
            # Other tests compute on one thread, where it sees nothing, and take ten times as long.
            step "llama.cpp under the thread sanitizer" with_llama thread '--slow -m threads' --sanitize thread
        fi
    fi
}
