"""uvicorn's server: it drains when it is told to stop, and closes connections that ask for nothing."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvcache.server.application import Limits, Server
from kvcache.server.log import logger

GRACE = 5.0  # seconds that answers have once the server is told to stop
BACKLOG = 128  # connections that wait; without file descriptors asyncio logs each of these, every second


class Protocol(H11Protocol):
    """Ends a connection whose request's headers do not come in time, or that does not take what is sent.

    `_timer` runs while it waits for headers, `_sending` while the client does not take what is sent.
    """

    def __init__(self, *args: Any, limits: Limits, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None  # closes it if no request comes
        self._sending: asyncio.TimerHandle | None = None  # ends it if the client takes nothing

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # one piece of an answer waits here; `pause_writing` says that it does
        self._await_request()

    def pause_writing(self) -> None:
        """Wait until the client takes what is sent: closing a connection would wait for that without end."""
        super().pause_writing()
        self._sending = self.loop.call_later(self._limits.timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """Send on."""
        super().resume_writing()
        if self._sending is not None:
            self._sending.cancel()

    def data_received(self, data: bytes) -> None:
        """Wait on for the rest of the headers, from when their first byte came."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget_timer()
        elif self._timer is None:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        for timer in (self._timer, self._sending):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _await_request(self) -> None:
        self._timer = self.loop.call_later(self._limits.read_timeout, self._close)

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        self._timer = None
        if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
            self.transport.close()


class HttpServer(uvicorn.Server):
    """uvicorn's server. Once it is told to stop, answers have `GRACE` seconds; the others end with an error."""

    def __init__(self, server: Server, say: Callable[[int], object] = lambda port: None, **options: Any) -> None:
        """Make it; `say` is told the port once it listens."""
        protocol: Any = partial(Protocol, limits=server.limits)
        # A client that reads slowly has as long again to read the error.
        options = {"timeout_graceful_shutdown": math.ceil(2 * GRACE), "http": protocol, "access_log": False, **options}
        options["backlog"] = BACKLOG
        super().__init__(uvicorn.Config(server.app(), **options))
        self.server, self._say = server, say

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        if self.started:
            self._say(self.servers[0].sockets[0].getsockname()[1] if self.servers else 0)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop; a second Ctrl-C ends the process at once."""
        if self.should_exit and sig == signal.SIGINT:
            logger.warning("ended before all answers were")
            logging.shutdown()
            os._exit(130)
        self.server.is_stopping = True
        super().handle_exit(sig, frame)  # first, as the next signal may come within this function
        logger.info("stopping: answers have %g s to end", GRACE)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let answers end, for so long."""
        self.server.is_stopping = True
        stopping = asyncio.get_running_loop().call_later(GRACE, self.server.stop)
        await super().shutdown(sockets)
        stopping.cancel()
