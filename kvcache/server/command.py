"""The command ``kvcache serve``: it loads a model, says what it serves, and listens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import transformers

from kvcache import NotSupportedError
from kvcache.columns import WIDTH, columns, wrap
from kvcache.errors import sentence, shown
from kvcache.server.adapters import add_adapters, read_adapters
from kvcache.server.application import Limits, Server
from kvcache.server.keys import read_keys
from kvcache.server.listening import HttpServer
from kvcache.server.log import configure, logger
from kvcache.server.model import Served, kept_prompts, load
from kvcache.system import available_memory, readable

ORIGIN = r"\*|null|[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+"  # as browsers send it: no path, no capitals


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    model: Path
    name: str | None = None  # that clients give; None: the folder's
    host: str = "127.0.0.1"
    port: int = 8000
    keys: Path | None = None
    capacity: int = 1 << 15  # tokens
    dtype: str | None = None
    select: int | None = None
    prompts: str | None = None
    store: str | None = None
    adapters: tuple[tuple[str, Path], ...] = ()  # the names that clients give, with PEFT's folders
    limits: Limits = field(default_factory=Limits)
    log_json: bool = False


def make(options: Options) -> Server:
    """Load the model, and make the application; raise ValueError for options with which no request could be served."""
    if options.model.suffix.lower() == ".gguf" and not options.model.exists():
        raise ValueError(f"there is no {options.model}")
    if options.model.suffix.lower() == ".gguf" or (options.model.is_dir() and _has_gguf_alone(options.model)):
        raise ValueError(
            f"{options.model} is for llama.cpp: kvcache-llama-server serves a GGUF, with -m FILE; see docs/server.md"
        )
    check_options(options)
    name = options.name or options.model.resolve().name.encode(errors="replace").decode()
    adapters = read_adapters(options.adapters, name)
    keys = None if options.keys is None else read_keys(options.keys, [one.name for one in adapters])
    model, tokenizer = load(options.model)
    how: dict[str, Any] = {"dtype": options.dtype, "select": options.select, "prompts": options.prompts}
    how = {name: value for name, value in how.items() if value is not None or name == "dtype"}
    engine: dict[str, Any] = {"max_running": options.limits.max_running, "max_waiting": options.limits.max_running}
    try:
        if options.store is not None:
            engine["prefix"] = kept_prompts(model, options.model, options.store, capacity=options.capacity, **how)
        names = add_adapters(model, adapters)
        served = Served(name, model, tokenizer, options.capacity, names, **how, **engine)
    except NotSupportedError as error:  # a server always keeps prompts
        raise ValueError(f"{options.model} cannot be served: {str(error).removesuffix(': leave prefix out')}") from None
    try:
        return Server(served, keys, options.limits)
    except BaseException:
        served.engine.close()
        raise


def check_options(options: Options) -> None:
    """Raise ValueError for names that no answer can have, and for what cannot be stored or matched."""
    for option, name in [("--name", options.name or ""), *(("--adapter", name) for name, _ in options.adapters)]:
        if name.encode(errors="replace").decode() != name:
            raise ValueError(f"{option} {shown(name)}: give a name in UTF-8")
    if options.store == "":
        raise ValueError("--store '': give a folder, or a URL such as dir:prompts?max_bytes=20GiB")
    if options.store and options.model.is_dir() and not any(options.model.glob("*.safetensors")):
        raise ValueError(
            f"--store {options.store}: {options.model} has no safetensors, by which the store tells models apart: "
            "save it with save_pretrained, or leave --store out"
        )
    for origin in options.limits.origins:
        if not re.fullmatch(ORIGIN, origin):
            raise ValueError(f"--cors-origin {shown(origin)}: give * or what browsers send, as https://chat.example")


def _has_gguf_alone(folder: Path) -> bool:
    return not (folder / "config.json").exists() and any(folder.glob("*.gguf"))


def serve(options: Options) -> None:
    """Serve until a signal says to stop."""
    transformers.logging.set_verbosity_error()  # it would warn with each request
    transformers.logging.disable_progress_bar()
    options = replace(options, host=options.host.strip("[]"))  # as URLs have them
    check_address(options.host, options.port)  # before the model is loaded
    with warnings.catch_warnings(record=True) as found:
        server = make(options)
    configure(options.log_json)
    for one in found:
        logger.warning("%s", one.message)
    where: dict[str, Any] = {"host": options.host, "port": options.port, "log_config": None}
    http = HttpServer(server, lambda port: print(opening(server, options, port), flush=True), **where)
    raise_open_files()
    http.run()


def raise_open_files() -> None:
    """Allow as many connections as the hard limit of files does: systemd's soft one is 1,024."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has no such limit, macOS may refuse
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def check_address(host: str, port: int) -> None:
    """Raise ValueError if nothing can listen there."""
    if not host:
        raise ValueError("--host '': give an address, such as 127.0.0.1, or 0.0.0.0 for all")

    async def listen() -> None:
        (await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port)).close()

    try:
        asyncio.run(listen())
    except UnicodeError:
        raise ValueError(f"--host {shown(host)} is no address and no name") from None
    except OSError as error:  # of a name that there is not, or what asyncio adds its own words to
        said = sentence(error) if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise ValueError(f"--host {host} --port {port}: {said}") from None


def opening(server: Server, options: Options, port: int) -> str:
    """Return what is served, where, in how much memory, and a command to try."""
    served, cache = server.served, server.engine.prefix.cache
    size = options.capacity * sum(layer.bytes_per_token for layer in cache.layers)
    free, source = available_memory()
    where = f"http://{f'[{options.host}]' if ':' in options.host else options.host}:{port}"
    key = "" if server.tenants.is_open else " -H 'Authorization: Bearer KEY'"
    if served.tokenizer.chat_template:
        path, body = "chat/completions", {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 50}
    else:
        path, body = "completions", {"prompt": "Once upon a time", "max_tokens": 50}
    says = [
        f"{', '.join(served.names)} on {where}/v1, for {'anybody' if server.tenants.is_open else 'clients with a key'}",
        f"room for {options.capacity:,} tokens of all requests, {readable(size)} of the {readable(free)} that are free "
        f"({source}); a request has at most {served.context:,}",
    ]
    lines = [wrap(one, columns(WIDTH), rest="  ") for one in says]
    return "\n".join([*lines, f"try: curl {where}/v1/{path}{key} -d '{json.dumps(body)}'"])
