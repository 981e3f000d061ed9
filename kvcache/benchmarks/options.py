"""The options of pytest with ``-p kvcache.benchmarks``: wrong ones are refused before anything is collected."""

from __future__ import annotations

import importlib
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcache.arguments import INT32_MAX
from kvcache.benchmarks.case import Implementation
from kvcache.tools.arguments import parse_tokens

if TYPE_CHECKING:
    from pytest import Config, Parser, UsageError  # noqa: PT013 - for types alone

LEAST = 32  # the smallest context, large enough for removing tokens


class Option(NamedTuple):
    """The parser, default and help of an option."""

    read: Callable[[str], Any]
    default: Any
    help: str


def _number(text: str) -> int:
    if not text.strip().isdecimal() or not 1 <= int(text) <= INT32_MAX:
        raise ArgumentTypeError(f"{text!r} is no number from 1 to {INT32_MAX}")
    return int(text)


def _tokens(text: str) -> int:
    number = parse_tokens(text)
    if not 1 <= number <= INT32_MAX:
        raise ArgumentTypeError(f"{text!r} is no number from 1 to {INT32_MAX}")
    return number


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


OPTIONS = {
    "context": Option(
        lambda text: tuple(map(_tokens, text.split(","))), (1024, 8192), "tokens that are stored, such as 1k,8k"
    ),
    "dtype": Option(_names, ("f32", "f16", "q8_0"), "types that rows are stored as, such as f32,f16,q8_0"),
    "prompt": Option(_tokens, 512, "tokens of a prompt, or half of the context if that is less"),
    "num-layers": Option(_number, 4, "layers that take turns"),
    "num-heads": Option(_number, 32, "query heads"),
    "num-kv-heads": Option(_number, 8, "KV heads"),
    "head-dim": Option(_number, 128, "elements of a row of one head"),
    "threads": Option(_number, 1, "threads of a call"),
}


def pytest_addoption(parser: Parser) -> None:
    """Add the options of the benchmarks."""
    group = parser.getgroup("kvcache", "kvcache.benchmarks")
    group.addoption(
        "--implementation", dest="kvcache_implementation", metavar="MODULE:CLASS", action="append",
        help="a cache of yours to time beside ours, see kvcache.benchmarks.Implementation; may be repeated",
    )  # fmt: skip
    for name, option in OPTIONS.items():
        single = isinstance(option.default, int)
        default = option.default if single else ",".join(map(str, option.default))
        group.addoption(
            f"--{name}", dest=f"kvcache_{name}", metavar="N" if single else "LIST", type=option.read,
            default=option.default, help=f"{option.help}; by default {default}",
        )  # fmt: skip


def pytest_configure(config: Config) -> None:
    """Refuse wrong options."""
    check(config)


def chosen(config: Config, name: str) -> Any:
    """Return the value of an option; its default if pytest runs without ``-p kvcache.benchmarks``."""
    return config.getoption(f"kvcache_{name}", OPTIONS[name].default)


def check(config: Config) -> None:
    """Raise a `pytest.UsageError` if options are wrong together or name no cache, or without pytest-benchmark."""
    if not config.pluginmanager.hasplugin("benchmark"):
        raise _wrong("kvcache.benchmarks needs pytest-benchmark: pip install pytest-benchmark")
    heads, kv_heads = chosen(config, "num-heads"), chosen(config, "num-kv-heads")
    if min(chosen(config, "context")) < LEAST:
        raise _wrong(f"--context {min(chosen(config, 'context'))}: must be {LEAST} at least")
    if heads % kv_heads:
        raise _wrong(f"--num-heads {heads}: must be a multiple of --num-kv-heads, {kv_heads}")
    implementations(config)


def implementations(config: Config) -> dict[str, type[Implementation]]:
    """Return the classes that ``--implementation`` names, by what it says."""
    folder = str(config.invocation_params.dir)
    return {name: _load(name, folder) for name in config.getoption("kvcache_implementation", None) or ()}


def _load(name: str, folder: str) -> type[Implementation]:
    """Return the class that ``--implementation`` names."""
    module, _, attribute = name.partition(":")
    if not all(map(str.isidentifier, [*module.split("."), attribute])):
        raise _wrong(f"--implementation {name}: give a module and a class, such as my.module:MyCache")
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        found: type[Implementation] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise _wrong(f"--implementation {name}: {error}") from None
    if lacking := [method for method in ("begin", "put", "attend", "commit") if not hasattr(found, method)]:
        raise _wrong(f"--implementation {name}: it has no {', '.join(lacking)}")
    return found


def _wrong(message: str) -> UsageError:
    import pytest  # here, because importing `kvcache.benchmarks` does not need it

    return pytest.UsageError(message)
