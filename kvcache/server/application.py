"""The application: routes, requests and their answers, whole or as streams."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvcache import PrefixCache
from kvcache.errors import plain, sentence, shown
from kvcache.hf import Request
from kvcache.server.answers import Answer, Piece, Places, chat_logprobs, events, text_logprobs, usage_of
from kvcache.server.drawing import STACK, Grammar
from kvcache.server.errors import ApiError, shutting_down
from kvcache.server.fields import Ask, parse, read
from kvcache.server.keys import Tenant, Tenants
from kvcache.server.log import log_request
from kvcache.server.metrics import CacheCollector, Gauges, RequestMetrics
from kvcache.server.model import Prompt, Served
from kvcache.server.speech import Call
from kvcache.server.text import Text
from kvcache.server.turns import Turns

CHAT = "/v1/chat/completions"
FLUSH = 10.0  # seconds in which prompts are written to the store before the server ends
NO_ROUTES = {  # of other interfaces, with what clients use here
    "/v1/embeddings": "this server has no embeddings",
    "/v1/responses": f"use {CHAT}: this server has no responses",
    "/v1/messages": f"use {CHAT}: this server has no messages",
}


@dataclass(frozen=True)
class Limits:
    """What a request may take. Seconds; bytes."""

    max_running: int = 64
    max_waiting: int = 256
    read_timeout: float = 30.0  # for a request to be read
    timeout: float = 600.0  # for an answer to be sent
    max_body: int = 8 << 20
    origins: tuple[str, ...] = ()  # of pages whose scripts may ask
    logs_requests: bool = False


class Server:
    """The application: routes, tenants, and what is counted."""

    def __init__(
        self,
        served: Served,
        keys: dict[str, dict[str, Any]] | None,
        limits: Limits = Limits(),
    ) -> None:
        self.served, self.engine, self.limits = served, served.engine, limits
        self.tenants = Tenants(served, keys)
        if served.context < 2:
            capacity = self.engine.prefix.cache.capacity or 0
            kept = sum(one.get("quota", 0) + one.get("pinned", 0) for one in (keys or {}).values())
            beside = f" beside quotas and pinned prompts of {kept:,} tokens in --keys" if kept else ""
            remedy = f"give at least {capacity + 2 - served.context}{', or keys that keep less' if kept else ''}"
            raise ValueError(f"--capacity {capacity} leaves no room for a request{beside}: {remedy}")
        served.try_one()
        threading.stack_size(STACK)  # of threads that prepare
        self.turns = Turns(limits.max_running, limits.max_waiting)
        self.answering: set[Answering] = set()  # requests that are answered
        self.readers: set[Any] = set()  # tasks that wait for a request's body
        self.is_stopping = False  # whether requests are refused
        self.registry = CollectorRegistry()
        prefixes: dict[tuple[str, ...], PrefixCache] = {
            (one.name, model): prefix for one in self.tenants for model, prefix in one.prefixes.items()
        }
        self.registry.register(CacheCollector(self.engine.prefix.cache, prefixes, ("tenant", "model")))
        self.metrics = RequestMetrics(self.registry, served.name)
        self.registry.register(Gauges({
            "vllm:num_requests_running": ("requests that run", lambda: self.engine.stats()["running"]),
            "vllm:num_requests_waiting": ("requests that wait", self._num_waiting),
            "vllm:num_preemptions_total": (
                "times that a request waited again for memory", lambda: self.engine.stats()["put_back"],
            ),
            "kvcache_server_pinned_tokens": (
                "tokens of pinned prompts", lambda: sum(one.num_pinned for one in self.tenants),
            ),
        }, served.name))  # fmt: skip

    def _num_waiting(self) -> int:
        return self.turns.num_waiting + self.engine.stats()["waiting"]

    def app(self) -> Starlette:
        """Return the application, which ends the engine when it ends."""
        routes = [
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route(CHAT, self.complete, methods=["POST"]),
            *(Route(path, self.refuse_route, methods=["GET", "POST"]) for path in NO_ROUTES),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
            Route("/metrics", self.show_metrics),
            Route("/health", self.health),
            Route("/ready", self.ready),
        ]
        origins = [*self.limits.origins]
        cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
        handlers: Any = {ApiError: self.refuse, HTTPException: self.refuse_http, Exception: self.refuse_any}
        return Starlette(
            routes=routes, exception_handlers=handlers, lifespan=self.run, middleware=[cors] if origins else []
        )

    @contextlib.asynccontextmanager
    async def run(self, app: Starlette) -> AsyncIterator[None]:
        """End all in the end."""
        try:
            yield
        finally:
            await asyncio.to_thread(self.close)

    def close(self) -> None:
        """End the engine, once prompts are in the store, or that takes too long."""
        end = time.monotonic() + FLUSH
        for one in self.tenants:
            for prefix in one.prefixes.values():
                prefix.close(max(0.0, end - time.monotonic()))
        self.engine.close()

    # ---- small routes

    async def models(self, http: HttpRequest) -> Response:
        """Answer which models there are, or tell one."""
        tenant = self.tenants.of(http.headers.get("authorization", ""))
        found = [{"id": name, "object": "model", "created": 0, "owned_by": "kvcache"} for name in tenant.prefixes]
        asked = http.path_params.get("name")
        if not asked:
            return JSONResponse({"object": "list", "data": found})
        tenant.check_model(asked)
        return JSONResponse(next(one for one in found if one["id"] == asked))

    async def health(self, http: HttpRequest) -> Response:
        """Answer whether the engine is alive."""
        is_alive = self.engine.is_alive
        return JSONResponse({"status": "ok" if is_alive else "stopped"}, 200 if is_alive else 503)

    async def ready(self, http: HttpRequest) -> Response:
        """Answer whether new requests are taken."""
        is_ready = self.engine.is_alive and not self.is_stopping
        return JSONResponse({"status": "ready" if is_ready else "stopping"}, 200 if is_ready else 503)

    async def show_metrics(self, http: HttpRequest) -> Response:
        """Answer with all counters, for Prometheus."""
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

    async def refuse_route(self, http: HttpRequest) -> Response:
        """Refuse a route of another interface by name."""
        raise ApiError(NO_ROUTES[http.url.path], status=404, code="no_such_route")

    async def refuse(self, http: HttpRequest, error: ApiError) -> Response:
        """Answer an error."""
        self.metrics.refused.labels(error.status).inc()
        if self.limits.logs_requests and not error.is_logged:
            log_request(path=http.scope["raw_path"].decode(), status=error.status, why=error.code)
        headers = error.headers | ({"WWW-Authenticate": "Bearer"} if error.status == 401 else {})
        return JSONResponse(error.body, error.status, headers)

    async def refuse_http(self, http: HttpRequest, error: HTTPException) -> Response:
        """Answer an error of the routes."""
        message, path = error.detail, http.url.path
        if error.status_code == 404:
            known = f"/v1{path}" in ("/v1/completions", CHAT, "/v1/models")
            message = f"there is no route {plain(path)}{': the base_url of clients ends in /v1' if known else ''}"
        response = await self.refuse(http, ApiError(message, status=error.status_code))
        response.headers.update(error.headers or {})
        return response

    async def refuse_any(self, http: HttpRequest, error: Exception) -> Response:
        """Answer an error of the server, which the log has."""
        return await self.refuse(http, ApiError("the server failed", status=500))

    # ---- requests

    async def complete(self, http: HttpRequest) -> Response:
        """Answer prompts or a chat, as a whole or as a stream."""
        begun, tenant = time.monotonic(), self.tenants.of(http.headers.get("authorization", ""))
        tenant.check_requests()
        tenant.num_requests += 1
        try:
            response = await self.answer(http, tenant, begun)
        except BaseException:
            tenant.num_requests -= 1
            raise
        if not isinstance(response, EventStream):
            tenant.num_requests -= 1
        return response

    async def answer(self, http: HttpRequest, tenant: Tenant, begun: float) -> Response:
        """Answer a request of a tenant."""
        try:
            body = await self.read_body(http)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        try:
            async with asyncio.timeout(self.limits.timeout):
                ask, prompts, grammar = await self.prepared(body, http.url.path == CHAT, tenant)
        except TimeoutError:
            raise timed_out(self.limits.timeout) from None
        lengths = [self.served.room(ask, one) for one in prompts]
        if self.is_stopping or not self.engine.is_alive:
            raise shutting_down()
        answering = Answering(self, tenant, ask, begun)
        for prompt, length in zip(prompts, lengths, strict=True):
            for i in range(ask.num_answers):
                seed = None if ask.seed is None else (ask.seed + i) % (1 << 63)
                answering.choices.append(Choice(answering, prompt, length, seed, grammar))
        try:
            async with asyncio.timeout(self.limits.timeout):
                found = await unless_gone(http, answering.begin() if ask.is_stream else answering.gather())
        except TimeoutError:
            answering.error = timed_out(self.limits.timeout)
        except ApiError as error:
            answering.error = error
        except BaseException:
            answering.end()
            raise
        if answering.error is None and ask.is_stream and found is not None:
            return EventStream(answering)
        if answering.error is None and found is None:
            answering.status = 499  # the client went away
        answering.end()
        if answering.error is not None:
            raise answering.error
        return Response(status_code=499) if found is None else JSONResponse(found)

    async def prepared(self, body: bytes, is_chat: bool, tenant: Tenant) -> tuple[Ask, list[Prompt], Grammar | None]:
        """Return what a thread prepares. The request counts until the thread has ended, as nothing stops one."""
        await tenant.preparing.acquire()
        thread = asyncio.create_task(asyncio.to_thread(self.prepare, body, is_chat, tenant))
        thread.add_done_callback(lambda _: tenant.preparing.release())
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            tenant.num_requests += 1
            thread.add_done_callback(tenant.end_request)
            raise

    def prepare(self, body: bytes, is_chat: bool, tenant: Tenant) -> tuple[Ask, list[Prompt], Grammar | None]:
        """Return a request, and what its answers begin with; a long body takes a while."""
        ask = read(parse(body), is_chat, self.served.num_tokens, self.served.context)
        tenant.check_model(ask.model)
        return ask, self.served.prompts_of(ask, tenant.max_pinned > 0), self.served.grammar_of(ask)

    async def read_body(self, http: HttpRequest) -> bytes:
        """Return a request's body."""
        if (coding := http.headers.get("content-encoding", "identity")) != "identity":
            raise ApiError(f"Content-Encoding={shown(coding)}: send the body without one", status=415)
        data, task, most = b"", asyncio.current_task(), self.limits.max_body
        self.readers.add(task)
        try:
            async with asyncio.timeout(self.limits.read_timeout):
                async for part in http.stream():
                    data += part
                    if len(data) > most:
                        raise ApiError(f"the body is longer than {most} bytes", status=413)
        except TimeoutError:
            raise ApiError(f"the body took longer than {self.limits.read_timeout:g} s", status=408) from None
        except asyncio.CancelledError:  # by `stop`
            raise shutting_down() from None
        finally:
            self.readers.remove(task)
        return data

    def stop(self) -> None:
        """End all requests after the step that runs, also requests of half a body, and begin no more."""
        self.is_stopping = True
        for reader in self.readers:
            reader.cancel()
        for one in self.answering:
            one.stop()


class Answering:
    """A request that is answered: its choices, and what is counted. `end` it, complete or not."""

    def __init__(self, server: Server, tenant: Tenant, ask: Ask, begun: float) -> None:
        self.server, self.tenant, self.ask, self.begun = server, tenant, ask, begun
        self.choices: list[Choice] = []
        self.model = ask.model or server.served.name
        self.answer = Answer(self.model, ask.chat is not None, ask.is_stream)
        self.error: ApiError | None = None  # which ends the answer
        self.status = 200  # for the log; an error has its own
        self._tasks: list[asyncio.Task[None]] = []
        server.answering.add(self)

    def stop(self) -> None:
        """End the answer with an error, as the server stops."""
        self.error = shutting_down()
        for choice in self.choices:
            choice.cancel()

    def end(self) -> None:
        """Count the request, and leave nothing behind."""
        server = self.server
        if self not in server.answering:
            return
        server.answering.remove(self)
        for task in self._tasks:
            task.cancel()
        for choice in self.choices:
            choice.end()
        if self.error is not None:
            self.error.is_logged = True
        if server.limits.logs_requests:
            usage = self.usage()
            status = self.status if self.error is None else self.error.status
            log_request(
                id=self.answer.id, tenant=self.tenant.name, status=status,
                prompt=usage["prompt_tokens"], cached=usage["prompt_tokens_details"]["cached_tokens"],
                generated=usage["completion_tokens"], seconds=round(time.monotonic() - self.begun, 3),
                reason=",".join(choice.reason for choice in self.choices),
            )  # fmt: skip

    def usage(self) -> dict[str, Any]:
        """Return what the request has used."""
        prompts = {id(one.prompt): one for one in reversed(self.choices)}.values()
        num_prompt = sum(len(one.prompt.tokens) for one in prompts)
        num_cached = sum(one.num_matched for one in prompts)
        return usage_of(num_prompt, sum(one.num_generated for one in self.choices), num_cached)

    async def begin(self) -> dict[str, Any]:
        """Wait for the first choice's turn, so that a stream is refused before it begins."""
        await self.choices[0].begin()
        return {}

    async def gather(self) -> dict[str, Any]:
        """Return the whole answer."""

        async def join(index: int, choice: Choice) -> dict[str, Any]:
            pieces = [piece async for piece in choice.pieces()]
            return self.answer.choice(index, pieces, choice.reason)

        async with asyncio.TaskGroup() as group:
            joining = [group.create_task(join(i, choice)) for i, choice in enumerate(self.choices)]
        return self.answer.of([task.result() for task in joining], usage=self.usage())

    async def lines(self) -> AsyncIterator[str]:
        """Yield the events of the answer as a stream."""
        queue: asyncio.Queue[dict[str, Any] | ApiError | None] = asyncio.Queue(1)

        async def put(index: int, choice: Choice) -> None:
            try:
                if self.ask.chat is not None:
                    await queue.put(self.answer.role(index))
                num_calls = 0
                async for piece in choice.pieces():
                    await queue.put(self.answer.part(index, piece, num_calls))
                    num_calls += piece.kind == "call"
                await queue.put(self.answer.part(index, None, num_calls, choice.reason))
                await queue.put(None)
            except ApiError as error:
                await queue.put(error)
            except Exception as error:
                await queue.put(ApiError(sentence(error), status=500))

        self._tasks = [asyncio.create_task(put(i, choice)) for i, choice in enumerate(self.choices)]
        left, end = len(self.choices), time.monotonic() + self.server.limits.timeout
        try:
            while left:
                async with asyncio.timeout(end - time.monotonic()):  # not around `yield`, where the client reads
                    found = await queue.get()
                if isinstance(found, ApiError):
                    raise found
                if time.monotonic() > end:
                    raise TimeoutError
                if found is None:
                    left -= 1
                    continue
                yield events([self.answer.of([found], **({"usage": None} if self.ask.wants_usage else {}))])
        except TimeoutError:
            self.error = timed_out(self.server.limits.timeout)
        except ApiError as error:
            self.error = error
        if self.error is not None:
            yield events([self.error.body])
            return
        usage = [self.answer.of([], usage=self.usage())] if self.ask.wants_usage else []
        yield events([*usage, "[DONE]"])


class Choice:
    """One answer to one prompt. `request` is the engine's, once its turn has come, and `reason` why it has ended."""

    def __init__(
        self, answering: Answering, prompt: Prompt, max_tokens: int, seed: int | None, grammar: Grammar | None
    ) -> None:
        self.answering, self.prompt, self.max_tokens, self.seed, self.grammar = (
            answering, prompt, max_tokens, seed, grammar,
        )  # fmt: skip
        self.request: Request | None = None  # None: it has not begun
        self.reason, self.num_generated = "abort", 0  # reason: why it ended
        self._has_called = False  # whether a call of a tool was handed out

    @property
    def num_matched(self) -> int:
        """How many tokens of the prompt were known."""
        return 0 if self.request is None else self.request.num_matched

    async def begin(self) -> Request:
        """Wait for a turn, and begin."""
        if self.request is not None:
            return self.request
        answering, server = self.answering, self.answering.server
        # A request is not refused any more once its first answer has begun.
        await server.turns.begin(answering.tenant, may_refuse=self is answering.choices[0])
        try:
            if answering.error is not None:
                raise answering.error
            tenant = answering.tenant.prefixes[answering.model]
            self.request = server.served.submit(
                self.prompt, answering.ask, self.max_tokens, self.seed, self.grammar, tenant
            )
        except BaseException:
            server.turns.end()
            raise
        # Whoever reads slowly keeps no turn.
        self.request.add_done_callback(partial(end_turn, server.turns, asyncio.get_running_loop()))
        server.metrics.queued.observe(time.monotonic() - answering.begun)
        server.metrics.prompt_tokens.inc(len(self.prompt.tokens))
        return self.request

    def cancel(self) -> None:
        """End it after the step that runs."""
        if self.request is not None:
            self.request.cancel()

    def end(self) -> None:
        """Count it, and pin its prompt as it is asked for."""
        server, tenant, num_prompt = self.answering.server, self.answering.tenant, len(self.prompt.tokens)
        metrics = server.metrics
        if self.request is None:
            return
        metrics.ended.labels(server.served.name, self.reason, tenant.name).inc()
        metrics.whole.observe(time.monotonic() - self.answering.begun)
        self.cancel()
        metrics.prompt_length.observe(num_prompt)
        metrics.answer_length.observe(self.num_generated)
        if self.reason in ("abort", "error"):
            return
        for num_tokens, seconds in (*self.prompt.pins, (num_prompt, self.answering.ask.seconds_kept)):
            if num_tokens and seconds:
                tenant.pin(self.answering.model, self.prompt.tokens[:num_tokens], seconds)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield what the answer goes on with; raise if it is not completed."""
        request = await self.begin()
        ask, served = self.answering.ask, self.answering.server.served
        text, speech = served.text_of(ask, self.prompt), served.speech_of(ask, self.prompt)
        if ask.echoes:
            yield Piece("content", self.prompt.text)
        seen, places = 0, Places()
        async for said, is_last in self.texts(request, text):
            parts: list[Any] = [("content", said)] if speech is None and said else []
            if speech is not None:
                parts = speech.add(said) + (speech.end() if is_last else [])
            parts, logprobs = self.allowed(parts), None
            if ask.num_logprobs is not None and seen < self.num_generated and (parts or is_last):
                logprobs, seen = self.logprobs(request, seen, places), self.num_generated
                parts = parts or [("content", "")]
            for part in parts:
                piece = Piece("call", call=part) if isinstance(part, Call) else Piece(*part)
                piece.logprobs, logprobs = logprobs, None
                yield piece
        if speech is not None and speech.num_calls and self.reason == "stop":
            self.reason = "tool_calls"

    def allowed(self, parts: list[Any]) -> list[Any]:
        """Return the parts without further calls, where a client wants one alone."""
        chat = self.answering.ask.chat
        if chat is None or not chat.one_call:
            return parts
        kept = []
        for part in parts:
            if not isinstance(part, Call) or not self._has_called:
                kept.append(part)
            self._has_called = self._has_called or isinstance(part, Call)
        return kept

    def logprobs(self, request: Request, begin: int, places: Places) -> dict[str, Any]:
        """Return the probabilities of the tokens from `begin` on."""
        served = self.answering.server.served
        tokens, known = request.tokens[begin : self.num_generated], request.logprobs[begin : self.num_generated]
        data = [*map(served.bytes_of, tokens)]
        named = [*zip(data, known, strict=True)]
        if self.answering.ask.chat is None:
            begins = [places.add(b"" if one in served.hidden else its) for one, its in zip(tokens, data, strict=True)]
            return text_logprobs(named, served.bytes_of, begins)
        return chat_logprobs(named, served.bytes_of)

    async def texts(self, request: Request, text: Text) -> AsyncIterator[tuple[str, bool]]:
        """Yield pieces of text, each with whether it is the last one; raise if the answer is not completed."""
        metrics, before = self.answering.server.metrics, self.answering.begun
        try:
            async for token in request:
                now = time.monotonic()
                (metrics.between if self.num_generated else metrics.first_token).observe(now - before)
                before, self.num_generated = now, self.num_generated + 1
                metrics.generated.inc()
                said, is_stopped = text.add(token)
                if is_stopped:
                    self.reason = "stop"
                    self.cancel()
                    yield said, True
                    return
                if said:
                    yield said, False
        except Exception as error:
            self.reason = "error"
            # A schema that cannot be followed any further is the client's error.
            raise error if isinstance(error, ApiError) else ApiError(sentence(error), status=500) from error
        if request.finish_reason == "cancelled":  # `Server.stop` did, as somebody still reads
            raise self.answering.error or shutting_down()
        said, is_stopped = text.end()
        self.reason = "stop" if is_stopped else request.finish_reason or ""
        yield said, True


class EventStream(StreamingResponse):
    """Streams an answer; the request ends with it, also if the client goes away before it begins."""

    def __init__(self, answering: Answering) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(answering.lines(), media_type="text/event-stream", headers=headers)
        self.answering = answering

    async def __call__(self, *args: Any) -> None:
        """Send it."""
        try:
            await super().__call__(*args)
        finally:
            self.answering.end()
            self.answering.tenant.num_requests -= 1


async def unless_gone(http: HttpRequest, waiting: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any] | None:
    """Return what is awaited, or None if the client goes away before; raise the first error of it."""

    async def leave() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(waiting), asyncio.create_task(leave())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def end_turn(turns: Turns, loop: asyncio.AbstractEventLoop, request: Request) -> None:
    """End a request's turn, in the engine's thread."""
    with contextlib.suppress(RuntimeError):  # the loop may have ended
        loop.call_soon_threadsafe(turns.end)


def timed_out(seconds: float) -> ApiError:
    """Return the error of an answer that took too long."""
    return ApiError(f"the answer took longer than {seconds:g} s", status=504, code="timeout")
