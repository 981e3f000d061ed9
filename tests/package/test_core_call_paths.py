"""The path of a call: how many functions in how many files one decode token of one layer goes through.

The core is compiled without optimisation, so that inline functions count; kernels are left aside. A change of file is a
call of a function in another file than its caller's; x.c and x.h are one file. pytest -s prints the counts.
"""

import os
import shutil
import subprocess
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest
from support.compiling import EMULATOR, FLAGS, LIBRARIES, ROOT, compile_all, compiler, run

RECORDER = Path(__file__).with_name("core_call_paths.c")
KERNEL = ("kernels", "")
INSTRUMENTED = ["-O0", "-gdwarf-4", "-fno-pie", "-finstrument-functions"]


class Count(NamedTuple):
    functions: int
    files: int
    changes: int


# The most that each may be. Lower a number when its path has become shorter.
MOST = {
    "begin": Count(85, 17, 65),
    "attend": Count(160, 21, 178),
    "commit": Count(33, 9, 25),
    "together": Count(248, 32, 268),
}


def works(command, source):
    """Return whether a program that is compiled so links and runs."""
    program = source.with_suffix("")
    built = subprocess.run([*command, source, "-o", program], capture_output=True).returncode == 0
    return built and subprocess.run([program], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def program(workshop, tmp_path_factory):
    """Build the core with the recorder. All of it is instrumented, except its kernels."""
    if not shutil.which("addr2line") or EMULATOR:
        pytest.skip("addresses of functions are not looked up here")
    folder = tmp_path_factory.mktemp("call_paths")
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    command, (linking, others) = [*compiler(), *FLAGS], workshop.core()
    if not works([*command, *INSTRUMENTED, "-no-pie"], probe):
        pytest.skip("the compiler does not instrument functions")

    def command_for(source):
        return [*command, *(INSTRUMENTED[:3] if source == RECORDER else INSTRUMENTED)]

    sources = [path for path in ROOT.glob("src/*/*.c") if path.parent.name != "kernels"]
    kernels = [name for name in others if Path(name).name.startswith("kernels-")]
    objects = compile_all(folder, [RECORDER, *sources], command_for)
    run(*linking, "-no-pie", *objects, *kernels, "-o", folder / "calls", *LIBRARIES)
    return folder / "calls"


def read_calls(program):
    """Return for each public call its functions as they were called: (caller's file, file, name)."""
    environment = os.environ | {"KVCACHE_ISA": "scalar"}
    lines = subprocess.run([program], env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    addresses = sorted({line[2:] for line in lines if line.startswith("+")})
    found = run("addr2line", "-f", "-e", program, *addresses).splitlines()
    places = [place.split(":")[0].rsplit("/src/", 1)[-1].rsplit(".", 1)[0] for place in found[1::2]]
    known = dict(zip(addresses, zip(places, found[::2], strict=True), strict=True))
    calls: dict[str, list[tuple[str, str, str]]] = {}
    path: list[tuple[str, str, str]] = []
    stack = [("", "")]
    for line in lines:
        if line.startswith("+"):
            called = known[line[2:]]
            if called[0].startswith("kernels/") or stack[-1] == KERNEL:
                called = KERNEL  # and all that it calls
            else:
                path.append((stack[-1][0], *called))
            stack.append(called)
        elif line == "-":
            stack.pop()
        else:
            path = calls[line] = []
    return calls


def count(calls):
    changes = sum(caller not in ("", file) for caller, file, _ in calls)
    return Count(len({call[1:] for call in calls}), len({file for _, file, _ in calls}), changes)


def test_decode_token(program):
    paths = read_calls(program)
    found = {name: count(path) for name, path in paths.items()}
    found["together"] = count([*chain.from_iterable(paths.values())])
    for name, counted in found.items():
        print(f"{name}: {counted.functions} functions in {counted.files} files, {counted.changes} changes of file")
    assert found.keys() == MOST.keys()
    assert all(n > 0 for counted in found.values() for n in counted)
    grown = {
        name: (counted, MOST[name])
        for name, counted in found.items()
        if any(n > most for n, most in zip(counted, MOST[name], strict=True))
    }
    assert not grown, "a call goes through more than before: call fewer functions, in fewer files"
