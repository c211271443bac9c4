"""HTTP client for threads without an event loop."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final
from urllib.parse import urlsplit

from windlass.closing import Closing
from windlass.errors import PeerTimeout, PeerUnreachable
from windlass.net.sockets import keep_alive
from windlass.net.tls import client_context


@dataclass(frozen=True, slots=True)
class HttpReply:
    """Answer of a server.

    Attributes:
        status: HTTP status.
        body: content of the answer.
    """

    status: int
    body: bytes

    def text(self, num_bytes: int) -> str:
        """Return the first `num_bytes` of the body as text, for an error message."""
        return self.body[:num_bytes].decode(errors="replace")


class _HTTPConnection(http.client.HTTPConnection):
    """HTTP connection with TCP keepalive, so that no network device drops it during a slow answer."""

    def connect(self) -> None:
        super().connect()
        keep_alive(self.sock)


class _HTTPSConnection(http.client.HTTPSConnection):
    """`_HTTPConnection` with TLS."""

    def connect(self) -> None:
        super().connect()
        keep_alive(self.sock)


@final
class BlockingHttp(Closing):
    """Client of one server, for one thread at a time. The client keeps its connection between requests.

    Args:
        url: URL of the server. The caller must check it with `windlass.net.addresses.check_url` before. A path in the
            URL is put before the path of each request.
        headers: headers of every request.
        to_controller: see `client_context`.

    Raises:
        ConfigError: see `client_context`.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str | bytes], *, to_controller: bool
    ) -> None:
        parts = urlsplit(url)
        self._url, self._prefix, self._headers = url, parts.path.rstrip("/"), dict(headers)
        host = parts.hostname or ""
        self._connection: http.client.HTTPConnection = (
            _HTTPSConnection(host, parts.port, context=client_context(to_controller=to_controller))
            if parts.scheme == "https"
            else _HTTPConnection(host, parts.port)
        )

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        *,
        deadline_s: float | None,
    ) -> HttpReply:
        """Send a request and return the answer, whatever its HTTP status. After an error, the next call connects again.

        Args:
            method: HTTP method.
            path: path and query.
            body: content of the request.
            headers: additional headers of this request.
            deadline_s: largest number of seconds without any byte from the server; None for no limit.

        Raises:
            PeerTimeout: the server sent nothing for `deadline_s`.
            PeerUnreachable: the connection could not be opened, or it broke.
        """
        what = f"{method} {self._url}{path.partition('?')[0]}"
        connection = self._connection
        # `timeout` is for a new connection. An open connection uses the timeout of its socket.
        connection.timeout = deadline_s
        if connection.sock is not None:
            connection.sock.settimeout(deadline_s)
        try:
            connection.request(
                method, self._prefix + path, body, {**self._headers, **(headers or {})}
            )
            response = connection.getresponse()
            return HttpReply(response.status, response.read())
        except TimeoutError as error:
            connection.close()
            raise PeerTimeout(f"{what}: no answer within {deadline_s} s") from error
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise PeerUnreachable(f"{what}: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._connection.close()
