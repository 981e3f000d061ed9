"""Serve a small Llama over HTTP, as OpenAI's interface does: many requests at once on one KVCache."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import json
import math
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(EXAMPLES), str(Path(__file__).parent)]

try:
    import uvicorn
    from engine import Engine, Request
    from metrics import CacheCollector
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest
    from protocol import MODEL, Answer, ApiError, events, parse, read_options, read_prompt, read_stream, usage_of
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
    from starlette.requests import Request as HttpRequest
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    from kvcache.errors import KVCacheError, sentence
    from kvcache.models.fingerprint import fingerprint
    from kvcache.runner import Llama
except ModuleNotFoundError as error:
    sys.exit(f"server.py: there is no module {error.name}; run: pip install -e '.[server]'")


MOST_BYTES = 1 << 20  # of a request's body
ENGINE = {"num_generated": "tokens that were generated", "num_preempted": "requests that waited again for memory"}
GRACE = 5.0  # seconds that answers have once the server is told to stop


class Tenant:
    """Who has a key: a part of the cache that is kept for it, and so many requests at once."""

    def __init__(self, engine: Engine, key: str, name: str, quota: int = 0, max_requests: int = 16) -> None:
        self.key, self.name, self.max_requests = key.encode(), name, max_requests
        self.prefix = engine.tenant(b"tenant " + self.key, quota)
        self.num_requests = 0


class Server:
    """The application: routes, tenants, and what is counted."""

    def __init__(self, engine: Engine, keys: dict[str, dict[str, Any]] | None) -> None:
        self.engine, self.is_open = engine, keys is None
        named = {"": {"name": "all"}} if keys is None else keys
        self.tenants = [Tenant(engine, key, **settings) for key, settings in named.items()]
        self.registry = CollectorRegistry()
        self.registry.register(CacheCollector(engine.cache, {one.name: one.prefix for one in self.tenants}))
        self.ended = Counter("server_requests", "requests that ended", ["tenant", "reason"], registry=self.registry)
        for name in ("running", "waiting"):
            gauge = Gauge(f"server_{name}", f"requests that are {name}", registry=self.registry)
            gauge.set_function(lambda name=name: len(getattr(engine, name)))
        for name in ENGINE:
            gauge = Gauge(f"server_{name}", ENGINE[name], registry=self.registry)
            gauge.set_function(lambda name=name: getattr(engine, name))

    def app(self) -> Starlette:
        routes = [
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/metrics", self.metrics),
            Route("/health", self.health),
        ]
        handlers: Any = {ApiError: refuse, HTTPException: refuse_http}
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=self.run)

    @contextlib.asynccontextmanager
    async def run(self, app: Starlette) -> AsyncIterator[None]:
        self.engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self.engine.close)

    async def models(self, http: HttpRequest) -> Response:
        self.tenant_of(http)
        one = {"id": MODEL, "object": "model", "created": 0, "owned_by": "kvcache"}
        return JSONResponse({"object": "list", "data": [one]})

    async def health(self, http: HttpRequest) -> Response:
        is_alive = self.engine.is_alive
        return JSONResponse({"status": "ok" if is_alive else "stopped"}, 200 if is_alive else 503)

    async def metrics(self, http: HttpRequest) -> Response:
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

    def tenant_of(self, http: HttpRequest) -> Tenant:
        if self.is_open:
            return self.tenants[0]
        kind, _, key = http.headers.get("authorization", "").partition(" ")
        found = [one for one in self.tenants if hmac.compare_digest(one.key, key.encode("latin-1"))]
        if kind.lower() != "bearer" or not found:
            raise ApiError("the API key is missing or wrong", status=401, code="invalid_api_key")
        return found[0]

    async def complete(self, http: HttpRequest) -> Response:
        """Answer a prompt or a chat, as a whole or as a stream."""
        tenant, is_chat = self.tenant_of(http), http.url.path.endswith("/chat/completions")
        data = b""
        try:
            async for part in http.stream():
                data += part
                if len(data) > MOST_BYTES:
                    raise ApiError(f"the body is longer than {MOST_BYTES} bytes", status=413)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        body = parse(data)
        is_stream, wants_usage = read_stream(body)
        prompt = read_prompt(body, is_chat)
        options = read_options(body, is_chat, len(prompt), self.engine.max_tokens)
        if tenant.num_requests >= tenant.max_requests:
            message = f"the key has {tenant.num_requests} requests already, its most: wait until one has ended"
            raise ApiError(message, status=429, code="rate_limit_exceeded")
        call = Call(self, tenant, Request(tenant.prefix, prompt, options), Answer(is_chat, is_stream))
        if is_stream:
            return EventStream(call, wants_usage)
        try:
            return await call.gather(http)
        finally:
            call.end()


class Call:
    """A request in the engine, and the pieces of its answer; `end` it, complete or not."""

    def __init__(self, server: Server, tenant: Tenant, request: Request, answer: Answer) -> None:
        self.server, self.tenant, self.request, self.answer = server, tenant, request, answer
        self.pieces: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.loop, self.reason, self.has_ended = asyncio.get_running_loop(), "", False
        request.deliver = self.deliver
        tenant.num_requests += 1
        server.engine.submit(request)

    def deliver(self, text: str, reason: str) -> None:
        """Take a piece, in the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and so has whoever waits
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, (text, reason))

    def end(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            self.tenant.num_requests -= 1
            self.server.engine.cancel(self.request)
            self.server.ended.labels(self.tenant.name, self.reason.partition(":")[0] or "cancelled").inc()

    async def take(self) -> AsyncIterator[tuple[str, str]]:
        """Yield the pieces; raise for an answer that was not completed."""
        while not self.reason:
            text, self.reason = await self.pieces.get()
            if self.reason == "shutdown":
                raise ApiError("the server is shutting down", status=503)
            if self.reason.startswith("error"):
                raise ApiError(self.reason, status=500)
            yield text, self.reason

    def usage(self) -> dict[str, Any]:
        one = self.request
        return usage_of(len(one.prompt), one.num_generated, one.num_matched or 0)

    async def gather(self, http: HttpRequest) -> Response:
        """Return the whole answer, unless its client goes away."""

        async def join() -> str:
            return "".join([text async for text, _ in self.take()])

        async def leave() -> None:
            while (await http.receive())["type"] != "http.disconnect":
                pass

        joining, leaving = asyncio.create_task(join()), asyncio.create_task(leave())
        try:
            await asyncio.wait([joining, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not joining.done():
                return Response(status_code=499)  # nobody reads it
            return JSONResponse(self.answer.body(joining.result(), self.reason, self.usage()))
        finally:
            for task in (joining, leaving):
                task.cancel()
            await asyncio.gather(joining, leaving, return_exceptions=True)


class EventStream(StreamingResponse):
    """Streams an answer; the request ends with it, also if the client goes away before it begins."""

    def __init__(self, call: Call, with_usage: bool) -> None:
        super().__init__(self.lines(call, with_usage), media_type="text/event-stream")
        self.call = call

    async def __call__(self, *args: Any) -> None:
        try:
            await super().__call__(*args)
        finally:
            self.call.end()

    async def lines(self, call: Call, with_usage: bool) -> AsyncIterator[str]:
        try:
            async for text, reason in call.take():
                yield events([call.answer.body(text, reason or None)])
        except ApiError as error:
            yield events([error.body])
            return
        yield events([*([call.answer.usage_chunk(call.usage())] if with_usage else []), "[DONE]"])


class HttpServer(uvicorn.Server):
    """uvicorn's server. Once it is told to stop, answers have `GRACE` seconds; the others end with an error."""

    def __init__(self, engine: Engine, app: Starlette, **options: Any) -> None:
        # A client that reads slowly has as long again to read the error.
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=math.ceil(2 * GRACE), **options))
        self.engine = engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stopping = asyncio.get_running_loop().call_later(GRACE, self.engine.stop)
        await super().shutdown(sockets)
        stopping.cancel()


async def refuse(http: HttpRequest, error: ApiError) -> Response:
    return JSONResponse(error.body, error.status)


async def refuse_http(http: HttpRequest, error: HTTPException) -> Response:
    return JSONResponse(ApiError(error.detail, status=error.status_code).body, error.status_code, error.headers)


def read_keys(path: Path) -> dict[str, dict[str, Any]]:
    """Read the API keys of a file, which no message quotes; raise ValueError for other settings than the README's."""
    try:
        keys = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    settings = [*keys.values()] if isinstance(keys, dict) else [None]
    if not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in settings):
        raise ValueError(f"{path} must have an object of keys, each of which has an object with a name")
    for one in settings:
        if unknown := one.keys() - {"name", "quota", "max_requests"}:
            raise ValueError(f"{path}: {one['name']} has a field {min(unknown)!r}, which there is not")
        if not all(type(value) is int and value >= 0 for field, value in one.items() if field != "name"):
            raise ValueError(f"{path}: quota and max_requests of {one['name']} must be whole numbers of at least 0")
    if len({one["name"] for one in settings}) < len(settings):  # counters tell tenants apart by their names
        raise ValueError(f"{path}: two keys have the same name")
    return keys


def make(args: argparse.Namespace) -> tuple[Engine, Starlette]:
    """Make the engine and the application; raise ValueError for options with which no request could be served."""
    model = Llama.load(args.model)
    if model.config.vocab_size > 256:
        raise ValueError(f"{args.model} has {model.config.vocab_size:,} tokens, which cannot be bytes")
    engine = Engine(model, args.capacity, fingerprint(args.model))
    server = Server(engine, read_keys(args.keys) if args.keys else None)
    if engine.max_tokens < 2:
        raise ValueError(f"--capacity {args.capacity} leaves no room for a request beside all quotas")
    return engine, server.app()


def main(arguments: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="server.py", description=__doc__)
    p.add_argument("model", nargs="?", default=str(EXAMPLES / "model"), help="a Llama whose tokens are bytes")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=8000, help="0: any free one (default: 8000)")
    p.add_argument("--capacity", type=int, default=1 << 15, metavar="TOKENS", help="of the cache (default: 32768)")
    p.add_argument("--keys", type=Path, metavar="FILE", help="JSON: the API keys, each with name, quota, max_requests")
    args = p.parse_args(arguments)
    if not 0 <= args.port < 1 << 16:
        p.error(f"--port {args.port}: must be from 0 to 65535")
    try:
        engine, app = make(args)
    except (KVCacheError, ValueError, OSError, ImportError) as error:
        p.error(sentence(error))
    try:  # uvicorn would say first that the application is ready
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        socket.create_server((args.host, args.port), family=family).close()
    except OSError as error:
        p.error(f"--host {args.host} --port {args.port}: {sentence(error)}")
    server = HttpServer(engine, app, host=args.host, port=args.port)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()


if __name__ == "__main__":
    main()
