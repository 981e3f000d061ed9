"""Test how llama.cpp is built on this cache: build.sh and kvcache.cmake, with a small project in llama.cpp's place."""

import hashlib
import io
import os
import shlex
import shutil
import subprocess
import tarfile
from pathlib import Path

import llama_cpp_build
import pytest
from support.compiling import ROOT

OURS = ROOT / "integrations/llama.cpp"
TARGETS = [
    *(f"llama-{name}" for name in ("cli", "completion", "server", "bench", "batched-bench", "perplexity", "quantize")),
    *(f"test-{name}" for name in ("llama-archs", "save-load-state", "state-restore-fragmented")),
    *(f"test-{name}" for name in ("recurrent-state-rollback", "thread-safety")),
]

# A project with llama.cpp's targets and options: each program prints what the library says, which a patch can change.
PROJECT = {
    "CMakeLists.txt": f"""
cmake_minimum_required(VERSION 3.21)
project(llama.cpp C CXX)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${{CMAKE_BINARY_DIR}}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${{CMAKE_BINARY_DIR}}/bin)
set(LLAMA_BUILD_COMMON ON)
if(LLAMA_SANITIZE_ADDRESS AND GGML_SANITIZE_ADDRESS)
  add_compile_options(-fsanitize=address)
  link_libraries(-fsanitize=address)
endif()
add_subdirectory(src)
add_library(llama-common INTERFACE)
foreach(program {" ".join(TARGETS)})
  add_executable(${{program}} EXCLUDE_FROM_ALL main.cpp)
  target_link_libraries(${{program}} PRIVATE llama)
endforeach()
""",
    "main.cpp": """
#include <cstdio>
const char *answer();
int main() { std::puts(answer()); }
""",
    "src/CMakeLists.txt": """\
add_library(llama answer.cpp other.cpp)
set_target_properties(llama PROPERTIES UNITY_BUILD ON POSITION_INDEPENDENT_CODE ON)
# here
""",
    "src/answer.cpp": """\
// here
const char *answer() { return "its own cache"; }
""",
    "src/other.cpp": "static int hidden;\nint other() { return hidden; }\n",
}
PATCH = """\
--- a/src/CMakeLists.txt
+++ b/src/CMakeLists.txt
@@ -1,3 +1,5 @@
 add_library(llama answer.cpp other.cpp)
 set_target_properties(llama PROPERTIES UNITY_BUILD ON POSITION_INDEPENDENT_CODE ON)
-# here
+if(LLAMA_KVCACHE)
+  include(${LLAMA_KVCACHE}/kvcache.cmake)
+endif()
--- a/src/answer.cpp
+++ b/src/answer.cpp
@@ -1,2 +1,2 @@
-// here
-const char *answer() { return "its own cache"; }
+#include "adapter.h"
+const char *answer() { return adapted(); }
"""
OTHER_PATCH = PATCH.replace("return adapted()", 'return "another patch"')

# This checkout: an adapter, whose names clash with llama.cpp's in one unit, and a core of one function.
CHECKOUT = {
    "CMakeLists.txt": """
cmake_minimum_required(VERSION 3.21)
project(kvcache C)
file(GLOB sources src/*/*.c)
add_library(kvcache_objects OBJECT ${sources})
set_target_properties(kvcache_objects PROPERTIES C_VISIBILITY_PRESET hidden POSITION_INDEPENDENT_CODE ON)
target_include_directories(kvcache_objects PRIVATE include)
""",
    "include/kvcache.h": """
#ifndef KVC_API
#define KVC_API __attribute__((visibility("default")))
#endif
#ifdef __cplusplus
extern "C" {
#endif
KVC_API const char *kvc_answer(void);
#ifdef __cplusplus
}
#endif
""",
    "src/base/answer.c": '#include "kvcache.h"\nconst char *kvc_answer(void) { return "this cache"; }\n',
    "integrations/llama.cpp/src/adapter.h": "const char *adapted();\n",
    "integrations/llama.cpp/src/adapter.cpp": """
#include "adapter.h"
#include <kvcache.h>
static int hidden;
const char *adapted() { return hidden ? nullptr : kvc_answer(); }
""",
    "integrations/llama.cpp/tests/test-kvcache-answer.cpp": """
#include "adapter.h"
#include <cstdio>
int main() { std::puts(adapted()); }
""",
    "integrations/llama.cpp/patches/01-memory.patch": PATCH,
}


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class Checkout:
    """A checkout with the real build.sh and kvcache.cmake, pinned to an archive of the small project."""

    def __init__(self, folder, project=PROJECT):
        self.root = folder / "checkout"
        self.build = folder / "build folder"
        self.here = self.root / "integrations/llama.cpp"
        self.environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHON": "/bin/false"}
        write(self.root, CHECKOUT)
        for name in ("build.sh", "kvcache.cmake"):
            shutil.copy(OURS / name, self.here)
        self.archive = folder / "llama_cpp_python-9.8.7.tar.gz"
        self.pin(project)

    def pin(self, project):
        """Pack the project, and pin the checkout to the archive."""
        with tarfile.open(self.archive, "w:gz") as tar:
            changes = "## [9.8.7]\n\n- feat: update llama.cpp to ggml-org/llama.cpp@abc123\n\n## [9.8.6]\n"
            files = {"CHANGELOG.md": changes} | {f"vendor/llama.cpp/{name}": text for name, text in project.items()}
            for name, text in files.items():
                entry = tarfile.TarInfo(f"llama_cpp_python-9.8.7/{name}")
                entry.size, entry.mtime = len(text.encode()), 1_000_000_000
                tar.addfile(entry, io.BytesIO(text.encode()))
        self.hash = hashlib.sha256(self.archive.read_bytes()).hexdigest()
        (self.here / "pin.txt").write_text(f"llama-cpp-python==9.8.7 --hash=sha256:{self.hash} # llama.cpp abc123\n")

    def run(self, *options):
        command = ["bash", self.here / "build.sh", "--output", self.build, *options]
        return subprocess.run(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
        )

    def succeeds(self, *options):
        done = self.run("--source", self.archive, *options)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def fails(self, *options):
        done = self.run(*options)
        assert done.returncode == 1, done.stdout
        return done.stdout

    def answer(self, program="llama-completion"):
        return subprocess.run([self.build / "bin" / program], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    for command in ("bash", "patch"):
        if not shutil.which(command):
            pytest.skip(f"there is no {command} here")
    return Checkout(tmp_path)


@pytest.fixture
def compilers():
    for command in ("cmake", "c++"):
        if not shutil.which(command):
            pytest.skip(f"there is no {command} here")


# ---- what is built


def test_the_programs_have_the_cache(checkout, compilers):
    checkout.succeeds()
    link = "kvcache-llama-server"
    assert {path.name for path in (checkout.build / "bin").iterdir()} == {"libllama.so", link, *TARGETS[:7]}
    assert checkout.answer() == checkout.answer("llama-server") == checkout.answer(link) == "this cache"
    assert (checkout.build / "bin" / link).readlink() == Path("llama-server")
    command = ["nm", "--dynamic", checkout.build / "bin/libllama.so"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "adapted" in names
    assert "kvc_" not in names, "the core's names are libllama's own"
    (signature,) = (checkout.build / "kvcache.sha256").read_text().split()
    assert signature == llama_cpp_build.hash_of_sources(checkout.root)


def commands(said):
    """Return the words of each command that the build's end advises."""
    return [shlex.split(line) for line in said.split("built: ")[1].splitlines() if line.startswith("    ")]


def test_the_end_says_what_to_type_next(checkout, compilers):
    said = checkout.succeeds()
    bin = str(checkout.build / "bin")
    assert f"built: {bin}\n" in said
    server, install, bench = commands(said)
    options = ["-m", "model.gguf", "--port", "8080", "--kvcache-prefix", "on"]
    assert server == ["OMP_WAIT_POLICY=passive", f"{bin}/kvcache-llama-server", *options]
    packages = [f"{checkout.root}[cli]", "llama-cpp-python==9.8.7"]
    assert install == ["CMAKE_ARGS=-DLLAMA_BUILD=OFF", "python3", "-m", "pip", "install", *packages]
    program = f"{checkout.here}/bench/bench_llama_cpp.py"
    assert bench == ["python3", program, "--library", bin, "--model", "model.gguf"]


@pytest.mark.slow
def test_the_end_of_a_static_build_names_llama_bench(checkout, compilers):
    """The benchmark in Python needs a shared library."""
    server, *bench = commands(checkout.succeeds("--static"))
    assert server[1] == f"{checkout.build}/bin/kvcache-llama-server"
    assert [words[:2] for words in bench] == [
        [f"LLAMA_KVCACHE={switch}", f"{checkout.build}/bin/llama-bench"] for switch in "01"
    ]


ADDRESS = "LLAMA_SANITIZE_ADDRESS=ON GGML_SANITIZE_ADDRESS=ON KVCACHE_SANITIZE=undefined GGML_OPENMP=ON"
THREAD = "LLAMA_SANITIZE_THREAD=ON GGML_SANITIZE_THREAD=ON KVCACHE_SANITIZE= GGML_OPENMP=OFF"
USUAL = "BUILD_SHARED_LIBS=ON GGML_OPENMP=ON CMAKE_BUILD_TYPE=Release LLAMA_BUILD_TESTS=OFF KVCACHE_SANITIZE="


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", f"{USUAL} LLAMA_SANITIZE_ADDRESS=OFF GGML_SANITIZE_ADDRESS=OFF"),
        ("--static", "BUILD_SHARED_LIBS=OFF GGML_OPENMP=ON"),
        ("--own-threads", "BUILD_SHARED_LIBS=ON GGML_OPENMP=OFF"),
        ("--sanitize address", ADDRESS),
        ("--sanitize thread", THREAD),
        ("--tests", "LLAMA_BUILD_TESTS=ON"),
    ],
)
def test_options(checkout, compilers, options, expected):
    checkout.succeeds("--static", "--sanitize", "address", "--tests")  # which the next options undo
    checkout.succeeds(*options.split())
    lines = (checkout.build / "CMakeCache.txt").read_text().splitlines()
    found = {line.split(":")[0]: line.split("=", 1)[1] for line in lines if ":" in line and "=" in line}
    for option in expected.split():
        name, _, value = option.partition("=")
        assert found[name] == value, option
    assert all(found[f"LLAMA_{name}"] == "OFF" for name in ("OPENSSL", "USE_PREBUILT_UI", "BUILD_UI", "ALL_WARNINGS"))
    assert checkout.answer() == "this cache"
    if options == "--static":
        command = ["ldd", checkout.build / "bin/llama-bench"]
        assert "libllama" not in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if options == "--tests":
        assert checkout.answer("test-kvcache-answer") == checkout.answer("test-llama-archs") == "this cache"


def shift_in(function, text):
    """Return the source text with a shift by too many bits at the beginning of a function."""
    shift = "static volatile int num_bits = 40;\nstatic int shifted() { return 1 << num_bits; }\n"
    return shift + text.replace(f"{function} {{", f"{function} {{ shifted();")


@pytest.mark.slow
def test_undefined_behaviour_ends_a_program_if_it_is_in_sources_of_this_repository(checkout, compilers):
    checkout.pin(PROJECT | {"main.cpp": shift_in("int main()", PROJECT["main.cpp"])})
    options = ("--sanitize", "address", "--tests")
    checkout.succeeds(*options)
    assert checkout.answer() == checkout.answer("test-kvcache-answer") == "this cache"
    for name, function, program in (
        ("tests/test-kvcache-answer.cpp", "int main()", "test-kvcache-answer"),
        ("src/adapter.cpp", "const char *adapted()", "llama-completion"),
    ):
        path = checkout.here / name
        path.write_text(shift_in(function, path.read_text()))
        checkout.succeeds(*options)
        done = subprocess.run([checkout.build / "bin" / program], capture_output=True, text=True)
        assert done.returncode != 0
        assert "shift exponent 40 is too large" in done.stderr


def test_the_sources_alone(checkout):
    assert checkout.succeeds("--prepare") == f"the patched sources are in {checkout.build}/source\n"
    assert "adapted" in (checkout.build / "source/src/answer.cpp").read_text()
    assert not (checkout.build / "CMakeCache.txt").exists()


def test_patches_are_applied_in_the_order_of_their_names(checkout):
    text = "A later patch.\n\n--- a/src/answer.cpp\n+++ b/src/answer.cpp\n@@ -1,2 +1,3 @@\n+// later\n" + "".join(
        f" {line}\n" for line in ('#include "adapter.h"', "const char *answer() { return adapted(); }")
    )
    write(checkout.here, {"patches/02-later.patch": text})
    checkout.succeeds("--prepare")
    assert (checkout.build / "source/src/answer.cpp").read_text().startswith('// later\n#include "adapter.h"\n')


def test_the_pin_names_the_commit_that_the_archive_has(checkout, compilers):
    pin = checkout.here / "pin.txt"
    right = pin.read_text()
    pin.write_text(right.replace("abc123", "abc124"))
    said = checkout.fails("--prepare", "--source", checkout.archive)
    assert "pin.txt names llama.cpp abc124, and llama-cpp-python 9.8.7 has abc123" in said
    pin.write_text(right)
    checkout.succeeds()
    assert "LLAMA_BUILD_COMMIT:UNINITIALIZED=abc123" in (checkout.build / "CMakeCache.txt").read_text()


def test_a_value_may_stand_behind_an_equals_sign(checkout):
    checkout.build = checkout.build.with_name("another folder")
    done = subprocess.run(
        ["bash", checkout.here / "build.sh", f"--output={checkout.build}", f"--source={checkout.archive}", "--prepare"],
        env=checkout.environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == f"the patched sources are in {checkout.build}/source\n"


def test_a_folder_of_something_else_is_refused(checkout):
    write(checkout.build, {"letter.txt": "Dear"})
    assert "has files of something else" in checkout.fails("--source", checkout.archive, "--prepare")
    assert [path.name for path in checkout.build.iterdir()] == ["letter.txt"]


@pytest.mark.slow
def test_only_what_has_changed_is_built_again(checkout, compilers):
    """Also where a file becomes older than what was built of it: a patch taken back, a file of another archive."""
    checkout.succeeds()
    program, library = checkout.build / "bin/llama-bench", checkout.build / "bin/libllama.so"
    times = [path.stat().st_mtime_ns for path in (program, library)]
    checkout.succeeds()
    assert [path.stat().st_mtime_ns for path in (program, library)] == times
    adapter = checkout.here / "src/adapter.cpp"
    old = adapter.read_text()
    adapter.write_text(old.replace("kvc_answer()", '"an edited adapter"'))
    checkout.succeeds()
    assert checkout.answer() == "an edited adapter"
    adapter.write_text(old)
    core = checkout.root / "src/base/answer.c"
    core.write_text(core.read_text().replace("this cache", "an edited core"))
    checkout.succeeds()
    assert checkout.answer() == "an edited core"
    for patch, expected in ((OTHER_PATCH, "another patch"), (PATCH, "an edited core")):
        (checkout.here / "patches/01-memory.patch").write_text(patch)
        checkout.succeeds()
        assert checkout.answer() == expected
    without = PATCH.replace(PATCH[PATCH.index("--- a/src/answer.cpp") :], "")
    (checkout.here / "patches/01-memory.patch").write_text(without)
    checkout.succeeds()
    assert checkout.answer() == "its own cache"
    checkout.pin(PROJECT | {"src/answer.cpp": PROJECT["src/answer.cpp"].replace("its own", "a newer")})
    checkout.succeeds()
    assert checkout.answer() == "a newer cache"


@pytest.mark.slow
def test_an_installed_library_can_be_used(checkout, compilers, tmp_path):
    if not shutil.which("pkg-config"):
        pytest.skip("there is no pkg-config here")
    prefix = tmp_path / "installed"
    write(prefix, {"answer.c": CHECKOUT["src/base/answer.c"].replace("this cache", "the installed library")})
    shutil.copy(checkout.root / "include/kvcache.h", prefix)
    command = ["cc", "-shared", "-fPIC", "-o", prefix / "libkvcache.so", prefix / "answer.c"]
    subprocess.run(command, check=True)
    described = f"Name: kvcache\nDescription: a\nVersion: 1\nCflags: -I{prefix}\nLibs: -L{prefix} -lkvcache\n"
    write(prefix, {"kvcache.pc": described})
    (checkout.root / "include/kvcache.h").unlink()
    checkout.succeeds("--prepare")
    source = checkout.build / "source"
    options = [f"-DLLAMA_KVCACHE={checkout.here}", "-DLLAMA_KVCACHE_SYSTEM=ON"]
    environment = os.environ | {"PKG_CONFIG_PATH": str(prefix)}
    for step in (
        ["-S", source, "-B", checkout.build, *options],
        ["--build", checkout.build, "--target", "llama-bench"],
    ):
        subprocess.run(["cmake", *step], env=environment, check=True)
    assert checkout.answer("llama-bench") == "the installed library"


# ---- where the archive comes from


def stub_pip(folder, body):
    """Write a program that stands for Python and its pip; it notes its arguments."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\necho "$@" >>"{folder}/calls"\n{body}\n')
    path.chmod(0o755)
    return str(path)


def test_pip_downloads_the_archive_once(checkout, tmp_path):
    cache = tmp_path / "cache/kvcache/llama.cpp"
    checkout.environment["PYTHON"] = stub_pip(tmp_path, f'[ "$3" = --version ] || cp "{checkout.archive}" "{cache}"')
    for _ in range(2):
        assert checkout.run("--prepare").returncode == 0
        shutil.rmtree(checkout.build)
    version, download = (tmp_path / "calls").read_text().splitlines()
    assert version == "-m pip --version"
    assert download.startswith("-m pip download ")
    options = ("--no-deps", "--no-binary llama-cpp-python", "--require-hashes", f"--requirement {checkout.here}/pin")
    assert all(option in download for option in options)
    (cache / checkout.archive.name).write_bytes(b"cut short")
    assert checkout.run("--prepare").returncode == 0
    assert (cache / checkout.archive.name).read_bytes() == checkout.archive.read_bytes()


def test_without_pip_it_says_what_to_do(checkout):
    said = checkout.fails("--prepare")
    assert "/bin/false has no pip" in said
    assert "https://pypi.org/project/llama-cpp-python/9.8.7/#files" in said
    assert "--source FILE" in said


def test_a_failing_download_names_the_other_way(checkout, tmp_path):
    checkout.environment["PYTHON"] = stub_pip(tmp_path, '[ "$3" = --version ] || { echo "no such host"; exit 1; }')
    said = checkout.fails("--prepare")
    assert "no such host" in said
    assert "pip could not get llama-cpp-python==9.8.7" in said
    assert "--source FILE" in said


def test_another_archive_is_refused(checkout, tmp_path):
    other = tmp_path / "other.tar.gz"
    other.write_bytes(b"something else")
    said = checkout.fails("--prepare", "--source", other)
    assert f"{other} is not the archive of llama-cpp-python 9.8.7" in said
    assert hashlib.sha256(b"something else").hexdigest() in said
    assert checkout.hash in said
    assert not (checkout.build / "source").exists()


def test_a_patch_that_does_not_fit_names_the_pin_and_leaves_the_sources(checkout):
    checkout.succeeds("--prepare")
    before = (checkout.build / "source/src/answer.cpp").read_text()
    (checkout.here / "patches/01-memory.patch").write_text(
        PATCH.replace('-const char *answer() { return "its own', "-const int x = 1")
    )
    said = checkout.fails("--prepare", "--source", checkout.archive)
    assert "patches/01-memory.patch does not apply to llama-cpp-python 9.8.7" in said
    assert "README.md says how to move the pin" in said
    assert (checkout.build / "source/src/answer.cpp").read_text() == before


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--statik"], "unknown option: --statik"),
        (["--source"], "--source needs a value"),
        (["--source", "--prepare"], "--source needs a value"),
        (["--sanitize", ""], "--sanitize needs a value"),
        (["--sanitize", "memory"], '--sanitize memory: there are "address" and "thread"'),
        (["--source", "nowhere.tar.gz"], "--source nowhere.tar.gz: there is no such file"),
    ],
)
def test_wrong_options(checkout, options, expected):
    """They leave no folder."""
    assert expected in checkout.fails(*options)
    assert not checkout.build.exists()


def test_a_source_is_looked_at_also_if_the_sources_are_there(checkout):
    checkout.succeeds("--prepare")
    assert "--source nowhere.tar.gz: there is no such file" in checkout.fails("--prepare", "--source", "nowhere.tar.gz")


def test_folders_are_not_looked_for_elsewhere(checkout, tmp_path):
    """An exported CDPATH lets cd go to another folder, and print it."""
    (tmp_path / "elsewhere/out").mkdir(parents=True)
    checkout.environment["CDPATH"] = f"{tmp_path / 'elsewhere'}:{checkout.root}"
    command = ["bash", "integrations/llama.cpp/build.sh", "--output", "out", "--prepare", "--source", checkout.archive]
    done = subprocess.run(command, env=checkout.environment, cwd=checkout.root, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"the patched sources are in {checkout.root}/out/source\n", "")


def test_a_missing_command_is_named(checkout, tmp_path):
    few = tmp_path / "bin"
    few.mkdir()
    needed = "bash cat cmp cp cut dirname getconf gzip mkdir mv rm sed sha256sum tar"
    for name in needed.split():
        (few / name).symlink_to(shutil.which(name))
    checkout.environment["PATH"] = str(few)
    assert "there is no patch here: install it" in checkout.fails("--source", checkout.archive)
    (few / "patch").symlink_to(shutil.which("patch"))
    assert "there is no cmake here: install CMake 3.21" in checkout.fails("--source", checkout.archive)


def test_help_shows_every_option(checkout):
    said = checkout.run("--help")
    assert said.returncode == 0
    taken = {word for line in (OURS / "build.sh").read_text().splitlines() for word in line.split(")")[0].split(" | ")}
    options = {word.strip() for word in taken if word.strip().startswith("--") and not {" ", "="} & {*word.strip()}}
    known = "output static own-threads sanitize tests source prepare help"
    assert options >= {f"--{name}" for name in known.split()}
    assert all(f"  {option} " in said.stdout for option in options), options
    assert "llama-cpp-python==9.8.7" in said.stdout


# ---- the pin


def test_the_pin_is_a_requirement_with_a_hash():
    (line,) = (OURS / "pin.txt").read_text().splitlines()
    line, _, commit = line.partition(" # llama.cpp ")
    assert len(bytes.fromhex(f"{commit}0")) == 5
    requirement, _, found = line.partition(" --hash=sha256:")
    assert requirement.startswith("llama-cpp-python==")
    assert len(bytes.fromhex(found)) == 32
