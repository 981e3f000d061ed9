"""Builds the core with the system's C compiler, and programs with it.

With OpenMP, as the package is, and under the address and undefined sanitizers if pytest runs the slow tests too, each
where it works; or as $CC and $KVCACHE_C_FLAGS say. The tests' own code has no undefined sanitizer by default. Programs
that ask for _OPENMP are built with it on any core, except under the thread sanitizer, which does not see OpenMP's
barriers.
$KVCACHE_C_EMULATOR is the command that runs what $CC builds for another processor or system.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADERS = sorted(ROOT.glob("include/*.h"))
INCLUDE = [f"-I{ROOT / folder}" for folder in ("include", "src", "tests/c", "tests")]
FLAGS = ["-std=c11", "-O1", "-g1", "-Wall", "-Wextra", "-Werror=unused-function", *INCLUDE]
LIBRARIES = ["-lm", "-lpthread"]
OPENMP = "-fopenmp"
EMULATOR = shlex.split(os.environ.get("KVCACHE_C_EMULATOR", ""))
TIMEOUT = 1800  # seconds, for programs under an emulator, or without optimisation under the sanitizers
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
COMPUTING = {"attend", "kernels", "fuzz_attention"}  # folders and programs that compute attention themselves
ENVIRONMENT = os.environ | {
    "ASAN_OPTIONS": "allocator_may_return_null=1:detect_stack_use_after_return=0",  # plugin.py turns it on
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "OMP_WAIT_POLICY": "passive",  # programs run side by side: a thread that waits leaves its processor to others
    "WINEDEBUG": "-all",
}


def compiler():
    """The compiler's command: $CC, the one Python was built with, or cc."""
    for command in (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc"):
        if command and shutil.which(shlex.split(command)[0]):
            return shlex.split(command)
    pytest.skip("there is no C compiler here")


def is_for_windows():
    """Return whether $CC builds programs for Windows."""
    return "mingw" in os.environ.get("CC", "")


def in_cpp(command):
    """The same command for C++: g++ for gcc, clang++ for clang, c++ for cc, with -std=c++17 for -std=c11."""
    names = {"gcc": "g++", "clang": "clang++", "cc": "c++"}
    command = [re.sub(r"(?<![a-z])(gcc|clang|cc)(?![a-z])", lambda found: names[found[1]], word) for word in command]
    if not shutil.which(command[0]):
        pytest.skip(f"there is no {command[0]} here")
    return ["-std=c++17" if word == "-std=c11" else word for word in command]


def run(*command, timeout=TIMEOUT):
    """Run a command that must succeed; return what it prints."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT, timeout=timeout
    )
    if done.returncode:
        pytest.fail(f"{shlex.join(map(str, command))}\nreturned {done.returncode}\n{done.stdout}", pytrace=False)
    return done.stdout


def runner_of(program, **options):
    """Return a function that runs a program with some arguments; it may fail."""

    def run_it(*arguments):
        command = [*EMULATOR, program, *arguments]
        return subprocess.run(command, capture_output=True, encoding="utf-8", env=ENVIRONMENT, timeout=900, **options)

    return run_it


def public_functions():
    """Return the names of the functions that the headers declare, and a shared library exports."""
    text = "".join(header.read_text() for header in HEADERS)
    return set(re.findall(r"^KVC_API [^;(]*?(kvc_\w+)\(", text, re.M))


def world_sources():
    """Return the sources of tests/world that all its drivers share."""
    world = ROOT / "tests/world"
    return sorted({*world.glob("*.c")} - {*world.glob("drive_*.c"), world / "scheduler.c"})


def works(cc, flags, folder):
    """Return whether a program built with these flags runs."""
    with tempfile.TemporaryDirectory(dir=folder) as own:  # two processes link in the same folder
        source, program = Path(own, "probe.c"), Path(own, "probe.exe")
        probe = "int main(void) { return 0; }\n"
        if OPENMP in flags:  # calls the runtime: a static one of another C library does not link
            probe = "#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n"
        source.write_text(probe)
        build = subprocess.run([*cc, *flags, source, "-o", program], capture_output=True)
        return build.returncode == 0 and subprocess.run([*EMULATOR, program], capture_output=True).returncode == 0


def compile_all(folder, sources, command_for):
    """Compile sources into a folder, each with the command that a function returns for it; return the objects."""

    def compile_one(source):
        target = folder / f"{source.parent.name}-{source.stem}.o"
        run(*command_for(source), "-c", source, "-o", target)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # kernels take the longest
        return list(pool.map(compile_one, sorted(sources, key=lambda source: source.parent.name != "kernels")))


def compile_core(folder, command):
    """Compile the core's sources into a folder; return the objects."""
    return compile_all(folder, ROOT.glob("src/*/*.c"), lambda source: command)


def build_core(folder):
    """Compile the core as it is to be tested; return the compiler's command, and the objects."""
    cc = compiler()
    if "KVCACHE_C_FLAGS" in os.environ:
        extra = shlex.split(os.environ["KVCACHE_C_FLAGS"])
    else:
        quick = ENVIRONMENT.get("KVCACHE_TEST_PART") == "quick"
        flags = [*SANITIZERS, "-fPIC"]  # test_reentrancy.py makes a library of the objects
        choice = [] if quick else [[*flags, "-static-libasan"], flags]  # the first one takes 0.8 of the time
        extra = next((flags for flags in choice if works(cc, flags, folder)), [])
        extra = [*extra, OPENMP] if works(cc, [*extra, OPENMP], folder) else extra
    if is_for_windows():
        extra = [*extra, "-isystem", f"{ROOT}/tests/c/windows"]
    command = [*cc, *FLAGS, *extra]
    return command, [str(path) for path in compile_core(folder, command)]


def watched(core, folder):
    """Return the core with a command for the address sanitizer, unless it has a sanitizer already or none works."""
    command, objects = core
    if any(word.startswith("-fsanitize") for word in command):
        return core
    choice = (["-fsanitize=address", *more] for more in (["-static-libasan"], []))
    return [*command, *next((flags for flags in choice if works(command, flags, folder)), [])], objects


def link(core, folder, *sources, flags=(), parts=()):
    """Build a program of C or C++ sources, compiled with these flags too, of parts and of the core; return its path."""
    command, objects = core
    if sources[0].suffix == ".cpp":
        command = in_cpp(command)
    if any("_OPENMP" in source.read_text() for source in sources) and "-fsanitize=thread" not in command:
        needed = [flag for flag in [*command, OPENMP] if flag.startswith(("-f", "-m", "-static"))]
        command = [*command, OPENMP] if works(compiler(), needed, folder) else command
    program = folder / f"{sources[0].stem}{'.exe' * is_for_windows()}"
    if (diverted := diverted_by(*sources)) and not is_for_windows():  # where calls of the system go through a table
        objects = [divert(command, objects, diverted, program.with_suffix(".core.o"))]
    own = compile_all(folder, sources, lambda source: [*command, *flags]) if flags else sources
    run(*command, *own, *parts, *objects, "-o", program, *LIBRARIES)
    return program


def diverted_by(*sources):
    """The calls of the core in whose place these sources have a function __wrap_x."""
    return sorted({name for source in sources for name in re.findall(r"\b__wrap_(\w+)\(", source.read_text())})


def divert(command, objects, names, joined):
    """Join objects to one that calls __wrap_x for each x of the names; a program's other calls stay as they are."""
    machine = [*takewhile(lambda word: not word.startswith("-"), command)]
    machine += [word for word in command if word.startswith(("-m", "--target"))]
    run(*machine, "-r", "-nostdlib", *(f"-Wl,--wrap={name}" for name in names), *objects, "-o", joined)
    return joined


# ---- what all processes of a test run share


class Workshop:
    """A folder in which the first process that needs a program builds it, and others wait for it."""

    def __init__(self, folder):
        self.folder = folder

    def once(self, name, function):
        """Return what the function returned, or skip or fail as it did, in the process that called it first."""
        from fcntl import LOCK_EX, flock  # there is none on Windows, where nothing is built

        path = self.folder / f"{name}.json"
        with open(path.with_suffix(".lock"), "w") as lock:
            flock(lock, LOCK_EX)
            if not path.exists():
                path.write_text(json.dumps(outcome_of(function)))
        outcome, value = json.loads(path.read_text())
        if outcome == "skip":
            pytest.skip(value)
        if outcome == "fail":
            pytest.fail(value, pytrace=False)
        return value

    def core(self):
        """Return the compiler's command, and the core's objects."""
        return self.once("core", lambda: build_core(self.folder))

    def build(self, *sources, flags=()):
        """Return the program of these sources and the core, the sources compiled with these flags too."""
        core = self.core()
        words = "\n".join(map(str, [*sources, *flags]))
        folder = self.folder / f"{sources[0].stem}-{hashlib.sha256(words.encode()).hexdigest()[:8]}"

        def build_in_folder():
            folder.mkdir(exist_ok=True)
            return str(link(core, folder, *sources, flags=flags))

        return Path(self.once(folder.name, build_in_folder))

    def run(self, *sources, arguments=()):
        """Build and run a program that tests the core. The undefined sanitizer is for the core alone.

        With it, programs take 1.5 times as long to compile. Most programs are not optimised: they compile in a fifth
        of the time, and run as fast.
        """
        flags = ["-fno-sanitize=undefined"] if {*SANITIZERS} <= {*self.core()[0]} else []
        if "KVCACHE_C_FLAGS" not in os.environ and not COMPUTING & {sources[0].parent.name, sources[0].stem}:
            flags.append("-O0")
        run(*EMULATOR, self.build(*sources, flags=flags), *arguments)


def outcome_of(function):
    """Call a function; return what it returned, or how it ended, in words for JSON."""
    try:
        return "return", function()
    except pytest.skip.Exception as skipped:
        return "skip", skipped.msg
    except pytest.fail.Exception as failed:
        return "fail", failed.msg
    except Exception:
        return "fail", traceback.format_exc()
