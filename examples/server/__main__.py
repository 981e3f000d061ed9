"""Serve a model of transformers over HTTP, as OpenAI's interface does: many requests at once on one KVCache."""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import transformers

    from examples.server.model import Served, load
    from examples.server.server import HttpServer, Server
    from kvcache.errors import KVCacheError, sentence
except ModuleNotFoundError as error:
    sys.exit(f"examples.server: there is no module {error.name}; run: pip install -e '.[hf,server]'")

EXAMPLE = Path(__file__).resolve().parents[1] / "model"


def read_keys(path: Path) -> dict[str, dict[str, Any]]:
    """Read the API keys of a file, which no message quotes; raise ValueError for other settings than the README's."""
    try:
        keys = json.loads(path.read_bytes(), object_pairs_hook=distinct)
        json.dumps(keys, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a character
        raise ValueError(f"{path} has text that UTF-8 cannot encode") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON of keys: {error}") from None
    settings = [*keys.values()] if isinstance(keys, dict) else [None]
    if not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in settings):
        raise ValueError(f"{path} must have an object of keys, each of which has an object with a name")
    for one in settings:
        if unknown := one.keys() - {"name", "quota", "max_requests"}:
            raise ValueError(f"{path}: {one['name']} has a field {min(unknown)!r}, which there is not")
        for field, least in (("quota", 0), ("max_requests", 1)):
            value = one.get(field, least)
            if type(value) is not int or not least <= value < 1 << 31:
                raise ValueError(
                    f"{path}: {field} of {one['name']} must be a whole number from {least} to {(1 << 31) - 1}"
                )
    if len({one["name"] for one in settings}) < len(settings):  # counters tell tenants apart by their names
        raise ValueError(f"{path}: two keys have the same name")
    return keys


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; raise ValueError if a field is there twice."""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key or a field is there twice")
    return found


def make(args: argparse.Namespace) -> Server:
    """Load the model, and make the application; raise ValueError for options with which no request could be served."""
    keys = read_keys(args.keys) if args.keys else None
    model, tokenizer = load(args.model)
    name = "kvcache-example" if args.model.resolve() == EXAMPLE else args.model.resolve().name
    options = {"dtype": args.dtype, "select": args.select, "prompts": args.prompts, "capacity": args.capacity}
    served = Served(name, model, tokenizer, **options)
    try:
        return Server(served, keys)
    except BaseException:
        served.engine.close()
        raise


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m examples.server", description=__doc__)
    p.add_argument(
        "model", nargs="?", type=Path, default=EXAMPLE,
        help="a folder with a model of transformers and its tokenizer (default: examples/model)",
    )  # fmt: skip
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=8000, help="0: any free one (default: 8000)")
    p.add_argument("--capacity", type=int, default=1 << 15, metavar="TOKENS", help="of the cache (default: 32768)")
    p.add_argument("--dtype", help="the type of the cache's rows: f16, int8, ... (default: f16)")
    p.add_argument("--select", type=int, metavar="ROWS", help="how many rows a token of a long text reads")
    p.add_argument("--prompts", choices=["stored", "int8"], help="int8: multiply prompts in bytes")
    p.add_argument("--keys", type=Path, metavar="FILE", help="JSON: the API keys, each with name, quota, max_requests")
    return p


def main(arguments: Sequence[str] | None = None) -> None:
    p = parser()
    args = p.parse_args(arguments)
    if not 0 <= args.port < 1 << 16:
        p.error(f"--port {args.port}: must be from 0 to 65535")
    transformers.logging.set_verbosity_error()  # it would warn with each request
    try:  # before the model is loaded, and before uvicorn says that the application is ready
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        socket.create_server((args.host, args.port), family=family).close()
    except OSError as error:
        p.error(f"--host {args.host} --port {args.port}: {sentence(error)}")
    try:
        server = make(args)
    except (KVCacheError, ValueError, OSError, ImportError) as error:
        p.error(sentence(error))
    with contextlib.suppress(KeyboardInterrupt):
        HttpServer(server, host=args.host, port=args.port).run()


if __name__ == "__main__":
    main()
