"""Errors of the endpoint, in OpenAI's format."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """Raised to answer a request with an error.

    Args:
        status: HTTP status.
        message: text for the agent.
        code: code for programs.
        retry: whether OpenAI's clients may repeat the request.
    """

    def __init__(self, status: int, message: str, code: str, *, retry: bool = False) -> None:
        super().__init__(message)
        self.status, self.code, self.retry = status, code, retry

    def body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": str(self), "type": kind, "param": None, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer. OpenAI's clients obey `x-should-retry`."""
        return {"x-should-retry": str(self.retry).lower()}
