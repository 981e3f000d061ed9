"""The instruction sets that this build and this machine have."""

import contextlib

import pytest

import kvcache


@contextlib.contextmanager
def using(name):
    """Caches that are made in it use this instruction set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCACHE_ISA", name)
        yield


def has_isa(name):
    with using(name):
        return kvcache.show_config(mode="dicts")["isa"] == name


NAMES = ("scalar", "avx2", "avx512", "avx512vnni", "avx512bf16", "amx", "amxfp16", "neon")
ISAS = [name for name in NAMES if has_isa(name)]
# For tests: without --slow only the oracle and the best set; a test in C covers the kernels of all.
ISA_PARAMS = [name if name in ("scalar", ISAS[-1]) else pytest.param(name, marks=pytest.mark.slow) for name in ISAS]
