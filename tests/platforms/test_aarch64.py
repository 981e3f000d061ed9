"""Processors of AArch64, by QEMU: which instruction sets each runs, and the tests of these sets' kernels."""

import re
import shutil
import subprocess

import pytest
from support.compiling import ENVIRONMENT, FLAGS, LIBRARIES, ROOT, compile_core, run

CC, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not shutil.which(CC) or not shutil.which(EMULATOR), reason=f"there is no {CC} or {EMULATOR}"),
]
PROCESSORS = {
    "cortex-a53": "scalar neon",
    "cortex-a72": "scalar neon",
    "a64fx": "scalar neon",
    "cortex-a76": "scalar neon neondotprod",
    "neoverse-n1": "scalar neon neondotprod",
    "neoverse-v1": "scalar neon neondotprod neonfhm neoni8mm neonbf16",
    "neoverse-n2": "scalar neon neondotprod neonfhm neoni8mm neonbf16",
    "max": "scalar neon neondotprod neonfhm neoni8mm neonbf16",
}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The program that tests the kernels, linked statically: the emulator would not find the other libraries."""
    folder = tmp_path_factory.mktemp("aarch64")
    command = [CC, *FLAGS, "-O2"]
    source = ROOT / "tests/c/kernels/test_kernels.c"
    run(*command, "-static", source, *compile_core(folder, command), "-o", folder / "kernels", *LIBRARIES)
    return folder / "kernels"


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_processor_runs_what_it_has(program, processor, monkeypatch):
    known = subprocess.run([EMULATOR, "-cpu", "help"], capture_output=True, text=True)  # it fails
    if processor not in known.stdout.split():
        pytest.skip(f"this QEMU knows no {processor}")
    monkeypatch.setitem(ENVIRONMENT, "KVCACHE_TEST_PART", "quick")
    absent = re.findall(r"^no (\w+) here: not tested$", run(EMULATOR, "-cpu", processor, program), re.M)
    names = re.findall(r'KVC_KERNEL_NAMES "(scalar neon [^"]+)"', (ROOT / "src/kernels/kernels.h").read_text())[0]
    assert [name for name in names.split() if name not in absent] == PROCESSORS[processor].split()
