"""Read the options of the benchmarks from pytest, and refuse wrong ones before anything is collected."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from kvcache.benchmarks import OPTIONS, Implementation

__all__ = ["check", "chosen", "implementations"]

LEAST = 32  # the smallest context, large enough for removing tokens


def chosen(config: pytest.Config, name: str) -> Any:
    """Return the value of an option; its default if pytest runs without ``-p kvcache.benchmarks``."""
    return config.getoption(f"kvcache_{name}", OPTIONS[name].default)


def check(config: pytest.Config) -> None:
    """Raise a `pytest.UsageError` if options are wrong together or name no cache, or without pytest-benchmark."""
    if not config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError("kvcache.benchmarks needs pytest-benchmark: pip install pytest-benchmark")
    heads, kv_heads = chosen(config, "num-heads"), chosen(config, "num-kv-heads")
    if min(chosen(config, "context")) < LEAST:
        raise pytest.UsageError(f"--context {min(chosen(config, 'context'))}: must be {LEAST} at least")
    if heads % kv_heads:
        raise pytest.UsageError(f"--num-heads {heads}: must be a multiple of --num-kv-heads, {kv_heads}")
    implementations(config)


def implementations(config: pytest.Config) -> dict[str, type[Implementation]]:
    """Return the classes that ``--implementation`` names, by what it says."""
    folder = str(config.invocation_params.dir)
    return {name: _load(name, folder) for name in config.getoption("kvcache_implementation", None) or ()}


def _load(name: str, folder: str) -> type[Implementation]:
    """Return the class that ``--implementation`` names."""
    module, _, attribute = name.partition(":")
    if not all(map(str.isidentifier, [*module.split("."), attribute])):
        raise pytest.UsageError(f"--implementation {name}: give a module and a class, such as my.module:MyCache")
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        found: type[Implementation] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise pytest.UsageError(f"--implementation {name}: {error}") from None
    if lacking := [method for method in ("begin", "put", "attend", "commit") if not hasattr(found, method)]:
        raise pytest.UsageError(f"--implementation {name}: it has no {', '.join(lacking)}")
    return found
