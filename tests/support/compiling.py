"""Builds the core with the system's C compiler, and programs with it.

With OpenMP and under the address and undefined sanitizers, where they work here; or as $CC and $KVCACHE_C_FLAGS say.
$KVCACHE_C_EMULATOR is the command that runs what $CC builds for another processor.
"""

import os
import shlex
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = [f"-I{ROOT / folder}" for folder in ("include", "src", "tests/c")]
FLAGS = ["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror=unused-function", *INCLUDE]
LIBRARIES = ["-lm", "-lpthread"]
EMULATOR = shlex.split(os.environ.get("KVCACHE_C_EMULATOR", ""))
TIMEOUT = 1800 if EMULATOR else 300  # seconds
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
ENVIRONMENT = os.environ | {
    "ASAN_OPTIONS": "allocator_may_return_null=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def compiler():
    """The compiler's command: $CC, the one Python was built with, or cc."""
    for command in (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc"):
        if command and shutil.which(shlex.split(command)[0]):
            return shlex.split(command)
    pytest.skip("there is no C compiler here")


def run(*command, timeout=TIMEOUT):
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT, timeout=timeout
    )
    if done.returncode:
        pytest.fail(f"{shlex.join(map(str, command))}\nreturned {done.returncode}\n{done.stdout}", pytrace=False)


def works(cc, flags, folder):
    """Whether a program built with these flags runs."""
    source, program = folder / "probe.c", folder / "probe"
    source.write_text("int main(void) { return 0; }\n")
    build = subprocess.run([*cc, *flags, source, "-o", program], capture_output=True)
    return build.returncode == 0 and subprocess.run([*EMULATOR, program], capture_output=True).returncode == 0


def compile_core(folder, command):
    """Compile the core's sources into a folder; return the objects."""
    sources = sorted(ROOT.glob("src/**/*.c"))
    objects = [folder / f"{source.parent.name}-{source.stem}.o" for source in sources]

    def compile_one(source, target):
        run(*command, "-c", source, "-o", target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, sources, objects))
    return objects


def build_core(folder):
    """Compile the core into a folder; return a function from C sources to a program of them and the core."""
    cc = compiler()
    if "KVCACHE_C_FLAGS" in os.environ:
        extra = shlex.split(os.environ["KVCACHE_C_FLAGS"])
    else:
        extra = [flag for flags in (SANITIZERS, ["-fopenmp"]) if works(cc, flags, folder) for flag in flags]
    flags = [*FLAGS, *extra]
    objects = compile_core(folder, [*cc, *flags])

    def build_program(*sources):
        program = folder / sources[0].stem
        run(*cc, *flags, *sources, *objects, "-o", program, *LIBRARIES)
        return program

    return build_program
