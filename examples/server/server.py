"""Serve a model over HTTP, as OpenAI's interface does: many requests at once on one engine."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import socket
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from examples.metrics import CacheCollector
from examples.server.model import Served
from examples.server.protocol import (
    Answer,
    ApiError,
    check_fields,
    events,
    parse,
    read_messages,
    read_options,
    read_prompt,
    read_stream,
    usage_of,
)
from examples.server.text import Text
from kvcache.errors import sentence
from kvcache.hf import Request

MOST_BYTES = 1 << 20  # of a request's body
ENGINE = {  # fields of `Engine.stats`
    "running": ("server_running", "requests that are running"),
    "waiting": ("server_waiting", "requests that are waiting"),
    "generated": ("server_num_generated", "tokens that were generated"),
    "put_back": ("server_num_preempted", "requests that waited again for memory"),
}
GRACE = 5.0  # seconds that answers have once the server is told to stop


class Tenant:
    """Who has a key: a part of the cache that is kept for it, and so many requests at once."""

    def __init__(self, served: Served, key: str, name: str, quota: int = 0, max_requests: float = 16) -> None:
        self.key, self.name, self.max_requests = key.encode(), name, max_requests
        self.prefix = served.tenant(b"tenant " + self.key, quota)
        self.num_requests = 0


class Server:
    """The application: routes, tenants, and what is counted."""

    def __init__(self, served: Served, keys: dict[str, dict[str, Any]] | None) -> None:
        self.served, self.engine, self.is_open = served, served.engine, keys is None
        named = {"": {"name": "all", "max_requests": math.inf}} if keys is None else keys
        self.tenants = [Tenant(served, key, **settings) for key, settings in named.items()]
        if served.context < 2:
            raise ValueError("the cache's capacity leaves no room for a request beside all quotas")
        served.try_one()
        self.calls: set[Call] = set()
        self.readers: set[Any] = set()  # tasks that wait for a request's body
        self.is_stopping = False
        self.registry = CollectorRegistry()
        prefixes = {one.name: one.prefix for one in self.tenants}
        self.registry.register(CacheCollector(self.engine.prefix.cache, prefixes))
        self.ended = Counter("server_requests", "requests that ended", ["tenant", "reason"], registry=self.registry)
        for field, (name, what) in ENGINE.items():
            gauge = Gauge(name, what, registry=self.registry)
            gauge.set_function(lambda field=field: self.engine.stats()[field])

    def app(self) -> Starlette:
        routes = [
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/metrics", self.metrics),
            Route("/health", self.health),
        ]
        handlers: Any = {ApiError: refuse, HTTPException: refuse_http, Exception: refuse_any}
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=self.run)

    @contextlib.asynccontextmanager
    async def run(self, app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(self.engine.close)

    async def models(self, http: HttpRequest) -> Response:
        self.tenant_of(http)
        one = {"id": self.served.name, "object": "model", "created": 0, "owned_by": "kvcache"}
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
        try:
            body = parse(await self.read_body(http))
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        is_stream, wants_usage = read_stream(body)
        check_fields(body, is_chat, self.served.name)
        prompt = await asyncio.to_thread(self.read_tokens, body, is_chat)  # a long text takes a while
        options = read_options(body, is_chat, len(prompt), self.served.context)
        if tenant.num_requests >= tenant.max_requests:
            message = f"the key has {tenant.num_requests} requests already, its most: wait until one has ended"
            raise ApiError(message, status=429, code="rate_limit_exceeded")
        if self.is_stopping or not self.engine.is_alive:
            raise shutting_down()
        request = self.served.submit(prompt, options, tenant.prefix)
        text, answer = Text(self.served.tokenizer, options.stop), Answer(self.served.name, is_chat, is_stream)
        call = Call(self, tenant, request, text, answer)
        if is_stream:
            return EventStream(call, wants_usage)
        try:
            return await call.gather(http)
        finally:
            call.end()

    async def read_body(self, http: HttpRequest) -> bytes:
        data, task = b"", asyncio.current_task()
        self.readers.add(task)
        try:
            async for part in http.stream():
                data += part
                if len(data) > MOST_BYTES:
                    raise ApiError(f"the body is longer than {MOST_BYTES} bytes", status=413)
        except asyncio.CancelledError:  # by `stop`
            raise shutting_down() from None
        finally:
            self.readers.remove(task)
        return data

    def read_tokens(self, body: dict[str, Any], is_chat: bool) -> list[int]:
        if is_chat:
            return self.served.tokens_of_chat(read_messages(body))
        prompt = read_prompt(body, self.served.num_tokens)
        return self.served.tokens_of(prompt) if isinstance(prompt, str) else prompt

    def stop(self) -> None:
        """End all requests after the step that runs, also requests of half a body, and begin no more."""
        self.is_stopping = True
        for reader in self.readers:
            reader.cancel()
        for call in self.calls:
            call.request.cancel()


class Call:
    """A request in the engine, and its answer; `end` it, complete or not."""

    def __init__(self, server: Server, tenant: Tenant, request: Request, text: Text, answer: Answer) -> None:
        self.server, self.tenant, self.request, self.text, self.answer = server, tenant, request, text, answer
        self.num_generated, self.reason = 0, "cancelled"
        tenant.num_requests += 1
        server.calls.add(self)

    def end(self) -> None:
        if self in self.server.calls:
            self.server.calls.remove(self)
            self.tenant.num_requests -= 1
            self.request.cancel()
            self.server.ended.labels(self.tenant.name, self.reason).inc()

    async def take(self) -> AsyncIterator[tuple[str, str | None]]:
        """Yield pieces of text, each with the reason why it is the last one; raise if the answer is not completed."""
        try:
            async for token in self.request:
                self.num_generated += 1
                text, is_stopped = self.text.add(token)
                if is_stopped:
                    self.reason = "stop"
                    yield text, self.reason
                    return
                if text:
                    yield text, None
        except Exception as error:
            self.reason = "error"
            raise ApiError(sentence(error), status=500) from error
        if self.request.finish_reason == "cancelled":  # `Server.stop` did, as somebody still reads
            self.reason = "shutdown"
            raise shutting_down()
        text, is_stopped = self.text.end()
        self.reason = "stop" if is_stopped else self.request.finish_reason or ""
        yield text, self.reason

    def usage(self) -> dict[str, Any]:
        return usage_of(len(self.request.prompt), self.num_generated, self.request.num_matched)

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
                yield events([call.answer.body(text, reason)])
        except ApiError as error:
            yield events([error.body])
            return
        yield events([*([call.answer.usage_chunk(call.usage())] if with_usage else []), "[DONE]"])


class HttpServer(uvicorn.Server):
    """uvicorn's server. Once it is told to stop, answers have `GRACE` seconds; the others end with an error."""

    def __init__(self, server: Server, **options: Any) -> None:
        # A client that reads slowly has as long again to read the error.
        super().__init__(uvicorn.Config(server.app(), timeout_graceful_shutdown=math.ceil(2 * GRACE), **options))
        self.server = server

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stopping = asyncio.get_running_loop().call_later(GRACE, self.server.stop)
        await super().shutdown(sockets)
        stopping.cancel()


def shutting_down() -> ApiError:
    return ApiError("the server is shutting down", status=503)


async def refuse(http: HttpRequest, error: ApiError) -> Response:
    return JSONResponse(error.body, error.status)


async def refuse_http(http: HttpRequest, error: HTTPException) -> Response:
    return JSONResponse(ApiError(error.detail, status=error.status_code).body, error.status_code, error.headers)


async def refuse_any(http: HttpRequest, error: Exception) -> Response:
    """Answer an error of the server, which the log has."""
    return JSONResponse(ApiError("the server failed", status=500).body, 500)
