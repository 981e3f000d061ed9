"""llama.cpp on this cache for Windows, by MinGW and Wine."""

import os
import subprocess
import sys

import llama_models
import pytest
from support.compiling import ENVIRONMENT, ROOT, run
from support.windows import CC, CXX, need, start_wine, wine

pytestmark = pytest.mark.full

# What llama.cpp's tests on this cache need of POSIX.
SETENV = """
#include <stdlib.h>
static inline int setenv(const char *name, const char *value, int) { return _putenv_s(name, value); }
static inline int unsetenv(const char *name) { return _putenv_s(name, ""); }
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The folder of llama.cpp's tests on this cache; those that fork or limit memory are not built."""
    need(CC, CXX, "cmake", "patch")
    start_wine()
    folder = tmp_path_factory.mktemp("llama")
    prepare = ["bash", ROOT / "integrations/llama.cpp/build.sh", "--prepare", "--output", folder]
    prepared = subprocess.run(prepare, env=ENVIRONMENT | {"PYTHON": sys.executable}, capture_output=True, text=True)
    if "pip could not get" in prepared.stderr or "has no pip" in prepared.stderr:
        pytest.skip("pip cannot get llama.cpp's sources here")
    assert prepared.returncode == 0, prepared.stderr
    (folder / "setenv.h").write_text(SETENV)
    off = ["BUILD_SHARED_LIBS", "GGML_OPENMP", "KVCACHE_OPENMP", "LLAMA_OPENSSL"]
    off += [f"LLAMA_{name}" for name in ("ALL_WARNINGS", "BUILD_APP", "BUILD_EXAMPLES", "BUILD_SERVER", "BUILD_UI")]
    run("cmake", "-S", folder / "source", "-B", folder / "build", "-DCMAKE_SYSTEM_NAME=Windows",
        "-DCMAKE_SYSTEM_PROCESSOR=x86_64", f"-DCMAKE_C_COMPILER={CC}", f"-DCMAKE_CXX_COMPILER={CXX}",
        # For newer versions of Windows ggml's C takes a struct that MinGW 10 lacks.
        "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_C_FLAGS=-D_WIN32_WINNT=0x0601",
        f"-DCMAKE_CXX_FLAGS=-include {folder}/setenv.h", "-DCMAKE_EXE_LINKER_FLAGS=-static",
        f"-DLLAMA_KVCACHE={ROOT}/integrations/llama.cpp", "-DLLAMA_BUILD_TESTS=ON",
        *(f"-D{name}=OFF" for name in off))  # fmt: skip
    targets = [f"test-kvcache{name}" for name in ("", "-prefix")]
    run("cmake", "--build", folder / "build", "--parallel", str(os.cpu_count()), "--target", *targets)
    return folder / "build/bin"


def test_llama_cpp_runs_on_this_cache(llama, tmp_path):
    model = llama_models.write_repository(tmp_path)
    scenes = wine(llama, "test-kvcache.exe", model)
    assert scenes.count("  ok ") >= 55, scenes
    assert wine(llama, "test-kvcache-prefix.exe", model).endswith("ok\n")
