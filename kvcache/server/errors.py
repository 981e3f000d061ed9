"""Errors that a client gets."""

from __future__ import annotations

from typing import Any

KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
RETRY_AFTER = {429: "1", 503: "5"}  # seconds after which a client may try again


class ApiError(Exception):
    """An error that a client gets.

    Attributes
    ----------
    status : int
        The status of HTTP.
    body : dict
        OpenAI's JSON of errors.
    """

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        message, param = message.encode(errors="replace").decode(), param and param.encode(errors="replace").decode()
        super().__init__(message)
        self.status = status
        self.is_logged = False  # with the request that it ended
        kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @property
    def code(self) -> str | None:
        """What kind of error it is, in a word."""
        code: str | None = self.body["error"]["code"]
        return code

    @property
    def headers(self) -> dict[str, str]:
        """Headers beside the body."""
        after = RETRY_AFTER.get(self.status)
        return {} if after is None else {"Retry-After": after}


def shutting_down() -> ApiError:
    """Return the error of a server that was told to stop."""
    return ApiError("the server is shutting down", status=503, code="shutting_down")
