"""Calls of an engine's own HTTP server."""

from __future__ import annotations

import http.client

import msgspec

from windlass.errors import PeerTimeout, PeerUnreachable
from windlass.net.sockets import open_connection

__all__ = ["NoSuchRoute", "get", "post"]

API_DEADLINE_S = 60.0


class NoSuchRoute(PeerUnreachable):
    """The engine's server has no such route: this release cannot do that."""


def post(url: str, path: str, body: object, deadline_s: float | None = API_DEADLINE_S) -> bytes:
    """POST JSON to the engine's own server and return the answer. Blocks.

    `deadline_s` is None only for a call that lasts as long as a pause does.

    Raises:
        PeerTimeout: no answer within `deadline_s`.
        NoSuchRoute: 404. PeerUnreachable: no connection, or an answer that is not 200.
    """
    return _ask("POST", url, path, msgspec.json.encode(body), deadline_s)


def get(url: str, path: str, deadline_s: float = API_DEADLINE_S) -> bytes:
    """GET from the engine's own server and return the answer. Blocks; raises as `post` does."""
    return _ask("GET", url, path, None, deadline_s)


def _ask(method: str, url: str, path: str, body: bytes | None, deadline_s: float | None) -> bytes:
    connection = open_connection(url, deadline_s)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
    except TimeoutError as error:
        raise PeerTimeout(f"{method} {url}{path}: no answer within {deadline_s} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise PeerUnreachable(f"{method} {url}{path}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if response.status == http.client.NOT_FOUND:
        raise NoSuchRoute(f"{method} {url}{path}: {response.status} {answer[:500]!r}")
    if response.status != http.client.OK:
        raise PeerUnreachable(f"{method} {url}{path}: {response.status} {answer[:500]!r}")
    return answer
