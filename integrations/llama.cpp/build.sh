#!/usr/bin/env bash
# Builds llama.cpp with its KV cache replaced: gets the source archive that pin.txt names, applies patches/ in
# the order of their names, compiles.
set -eu
unset CDPATH # with which cd may go elsewhere

usage() {
    cat <<END
usage: build.sh [options]

Builds libllama and llama.cpp's tools with this cache in them:
$(printf '  %s\n' $programs)
The sources of llama.cpp are those in the source archive of $(sed 's/ .*//' "$here/pin.txt"), which pip downloads once.
Building again compiles what has changed only.

  --output DIR       where to build; the programs are in DIR/bin, the patched sources in DIR/source. It is a new
                     folder, an empty one or that of a build
                     (default: a folder of $cache, named after the other options)
  --static           link the libraries into the programs (default: shared libraries)
  --own-threads      compute on ggml's own threads (default: on OpenMP's, where the compiler has them)
  --sanitize KIND    build with the sanitizer "address", and the sources of this repository also with that of
                     undefined behaviour; or with "thread", and then on ggml's own threads: it does not see
                     what OpenMP synchronises
  --valkey           keep prompts on servers of Valkey or Redis, too; it needs hiredis and pkg-config
  --tests            build llama.cpp's tests of memory and state too, and those of this folder
  --source FILE      use this source archive instead of downloading it
  --prepare          unpack and patch the sources, without building
  --help             show this text

It needs bash, tar and patch; Python 3 with pip, unless the archive is at hand; CMake 3.21 and compilers of C11 and
C++17. It uses ninja and ccache where they are.
END
}

fail() {
    printf 'build.sh: %s\n' "$@" >&2
    exit 1
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kvcache/llama.cpp
programs='llama-cli llama-completion llama-server llama-bench llama-batched-bench llama-perplexity llama-quantize'
output='' archive='' kind=shared threads=openmp sanitizer='' tests=OFF valkey=OFF prepare=''

while [ $# -gt 0 ]; do
    case $1 in
        --output=* | --source=* | --sanitize=*)
            set -- "${1%%=*}" "${1#*=}" "${@:2}"
            ;;
    esac
    case $1 in
        --output | --source | --sanitize)
            [ -n "${2:-}" ] && [ "${2#--}" = "$2" ] || fail "$1 needs a value; build.sh --help shows the options"
            ;;
    esac
    case $1 in
        --output) output=$2 && shift ;;
        --source) archive=$2 && shift ;;
        --sanitize) sanitizer=$2 && shift ;;
        --static) kind=static ;;
        --own-threads) threads=own ;;
        --valkey) valkey=ON ;;
        --tests) tests=ON ;;
        --prepare) prepare=yes ;;
        --help) usage && exit ;;
        *) fail "unknown option: $1; build.sh --help shows the options" ;;
    esac
    shift
done
case $sanitizer in
    '' | address) ;;
    thread) threads=own ;;
    *) fail "--sanitize $sanitizer: there are \"address\" and \"thread\"" ;;
esac
output=${output:-$cache/$kind-$threads${sanitizer:+-$sanitizer}}
jobs=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)

# needs command "remedy": fails if the command is missing
needs() { command -v "$1" >/dev/null || fail "there is no $1 here: $2"; }

# ---- the sources

read -r requirement hash _ _ commit <"$here/pin.txt"
version=${requirement#*==} hash=${hash##*:}
name=llama_cpp_python-$version

# sha256 file...: the hash of the files one after the other
sha256() { cat "$@" | if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi | cut -d' ' -f1; }

# Downloads the archive into the cache folder, unless it is there; pip compares the hash before it opens the archive.
download() {
    local python=${PYTHON:-python3}
    archive=$cache/$name.tar.gz
    if [ -f "$archive" ] && [ "$(sha256 "$archive")" = "$hash" ]; then return; fi
    "$python" -m pip --version >/dev/null 2>&1 ||
        fail "$python has no pip, which downloads the sources. Name a Python that has one (PYTHON=...), or" \
            "download $name.tar.gz from https://pypi.org/project/llama-cpp-python/$version/#files, and give it: --source FILE"
    echo "downloading $name.tar.gz to $cache"
    mkdir -p "$cache"
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
        --require-hashes --requirement "$here/pin.txt" --dest "$cache" ||
        fail "pip could not get llama-cpp-python==$version with the hash in pin.txt; it says why above. An archive at hand" \
            "can be given: --source FILE"
}

check() {
    [ -f "$archive" ] || fail "--source $archive: there is no such file"
    local found
    found=$(sha256 "$archive")
    [ "$found" = "$hash" ] ||
        fail "$archive is not the archive of llama-cpp-python $version: its sha256 is" "$found, expected" \
            "$hash. Leave out --source to have it downloaded."
}

# Prints the commit of llama.cpp that the archive has, which its list of changes names.
commit_of_archive() {
    local commit
    commit=$(tar -xzOf "$archive" "$name/CHANGELOG.md" |
        sed -n "/^## \\[$version\\]/,/^## \\[/s/.*llama\\.cpp@\\([0-9a-f]*\\).*/\\1/p")
    echo "${commit%%$'\n'*}" # the first
}

# Unpacks and patches the sources into $output/source.new.
unpack() {
    local patch
    needs patch "install it (it is a package of that name)"
    [ "$(commit_of_archive)" = "$commit" ] ||
        fail "pin.txt names llama.cpp $commit, and llama-cpp-python $version has $(commit_of_archive)"
    rm -rf "$output/source.new"
    mkdir -p "$output/source.new"
    tar -xzf "$archive" -C "$output/source.new" --strip-components=3 "$name/vendor/llama.cpp"
    for patch in "$here"/patches/*.patch; do
        patch --directory="$output/source.new" --strip=1 --forward --batch --silent <"$patch" ||
            fail "patches/${patch##*/} does not apply to llama-cpp-python $version. Patches and pin.txt belong together:" \
                "take them from one commit. README.md says how to move the pin."
    done
}

# Prints the names of the files that the patches change, or those that an earlier build was made with.
patched_files() { cat "$here"/patches/*.patch "$output/source.patch" | sed -n 's|^+++ b/\([^[:space:]]*\).*|\1|p' | sort -u; }

# Brings the times of the new sources in order for a build of the old ones. Files of the archive have its times; of those
# that a patch changes, the ones that stay the same keep theirs. Those of another archive are all new.
set_times() {
    local old=$output/source new=$output/source.new file
    cmp -s "$here/pin.txt" "$output/source.pin" || { find "$new" -type f -exec touch {} + && return; }
    patched_files | while read -r file; do
        if cmp -s "$old/$file" "$new/$file"; then
            touch -r "$old/$file" "$new/$file"
        elif [ -e "$new/$file" ]; then
            touch "$new/$file"
        fi
    done
}

prepare() {
    if cmp -s "$here/pin.txt" "$output/source.pin" && cat "$here"/patches/*.patch | cmp -s - "$output/source.patch"; then
        return
    fi
    if [ -z "$archive" ]; then download; fi
    unpack
    if [ -d "$output/source" ]; then set_times; fi
    rm -rf "$output/source" "$output/source.pin"
    mv "$output/source.new" "$output/source"
    cat "$here"/patches/*.patch >"$output/source.patch"
    cp "$here/pin.txt" "$output/source.pin"
}

# ---- the build

configure() {
    local shared=OFF openmp=OFF address=OFF thread=OFF ours='' type=Release
    case $kind in shared) shared=ON ;; esac
    case $threads in openmp) openmp=ON ;; esac
    case $sanitizer in
        address) address=ON ours=undefined type=RelWithDebInfo ;;
        thread) thread=ON type=RelWithDebInfo ;;
    esac
    local options=(
        "-DLLAMA_KVCACHE=$here" "-DCMAKE_BUILD_TYPE=$type" "-DBUILD_SHARED_LIBS=$shared" "-DGGML_OPENMP=$openmp"
        "-DKVCACHE_OPENMP=$openmp"
        "-DLLAMA_SANITIZE_ADDRESS=$address" "-DGGML_SANITIZE_ADDRESS=$address"
        "-DLLAMA_SANITIZE_THREAD=$thread" "-DGGML_SANITIZE_THREAD=$thread" "-DKVCACHE_SANITIZE=$ours"
        "-DLLAMA_KVCACHE_VALKEY=$valkey" "-DLLAMA_BUILD_TESTS=$tests" -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF
        "-DLLAMA_BUILD_COMMIT=$commit"
        -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
        -DLLAMA_ALL_WARNINGS=OFF # thousands about GCC 12's own headers
    )
    if command -v ccache >/dev/null; then
        options+=(-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
    fi
    if command -v ninja >/dev/null && [ ! -e "$output/Makefile" ]; then options+=(-G Ninja); fi
    cmake -S "$output/source" -B "$output" "${options[@]}" >"$output/configure.log" 2>&1 || {
        cat "$output/configure.log"
        fail "CMake could not configure the build; it says why above"
    }
}

build() {
    local targets=(llama $programs)
    if [ $tests = ON ]; then
        targets+=(test-llama-archs test-save-load-state test-state-restore-fragmented test-recurrent-state-rollback
            test-thread-safety kvcache-tests)
    fi
    cmake --build "$output" --parallel "$jobs" --target "${targets[@]}"
    ln -sf llama-server "$output/bin/kvcache-llama-server"
}

# Says what to type next.
advise() {
    local bin checkout
    bin=$(printf %q "$output/bin")
    checkout=$(printf %q "$(cd "$here/../.." && pwd)")
    cat <<END
built: $output/bin

Run a server, with a model of yours in the place of model.gguf, that computes prompts that begin alike once. Leave out
OMP_WAIT_POLICY=passive if the machine does nothing else:

    OMP_WAIT_POLICY=passive $bin/kvcache-llama-server -m model.gguf --port 8080 --kvcache-prefix on

See how much faster the model is than on llama.cpp's own cache:

END
    case $kind in
        static)
            echo "    LLAMA_KVCACHE=0 $bin/llama-bench -m model.gguf -p 512 -n 32 -d 0,8192"
            echo "    LLAMA_KVCACHE=1 $bin/llama-bench -m model.gguf -p 512 -n 32 -d 0,8192"
            ;;
        shared)
            echo "    CMAKE_ARGS=-DLLAMA_BUILD=OFF python3 -m pip install $checkout'[cli]' llama-cpp-python==$version"
            echo "    python3 $(printf %q "$here")/bench/bench_llama_cpp.py --library $bin --model model.gguf"
            ;;
    esac
}

# Writes a hash of what this checkout has in the build, by which its tests know a build that is theirs.
sign() {
    local LC_ALL=C
    shopt -s nullglob
    cd "$here"
    sha256 ../../include/*.h kvcache.cmake pin.txt patches/*.patch src/*.* tests/*.{cpp,h} ../../src/*/*.[ch] \
        >"$output/kvcache.sha256"
}

if [ -n "$archive" ]; then check; fi
if [ -n "$(ls -A "$output" 2>/dev/null)" ] && [ ! -e "$output/source.pin" ] && [ ! -e "$output/source.new" ]; then
    fail "--output $output: the folder has files of something else; name a folder that is new, empty or a build's"
fi
mkdir -p "$output"
output=$(cd "$output" && pwd)
prepare
if [ -n "$prepare" ]; then
    echo "the patched sources are in $output/source"
    exit
fi
needs cmake "install CMake 3.21 or later (pip install cmake has it as well)"
configure
build
sign
advise
