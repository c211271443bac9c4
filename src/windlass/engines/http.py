"""HTTP requests to an engine's own server (vLLM's or SGLang's)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import final

import msgspec

from windlass.engines.private_routes import KEY_HEADER
from windlass.errors import PeerUnreachable
from windlass.net.blocking_http import BlockingHttp

API_DEADLINE_S = 60.0
LONGEST_ANSWER = 8192
"""Maximum number of bytes that an error quotes from a response. In a long response, the reason is often near the end."""


class NoSuchRoute(PeerUnreachable):
    """The engine's server answered 404: the route does not exist in this release of the engine."""


@final
@dataclass(frozen=True, slots=True)
class EngineHttp:
    """An engine's own server, and the keys that open the server's routes.

    Attributes:
        url: address of the server.
        key: key of the server's private routes, see `windlass.engines.private_routes`.
        api_key: value of the engine's option `--api-key`; empty if not set.
        admin_api_key: value of SGLang's option `--admin-api-key`, which POST requests send instead of
            `api_key`; empty if not set.
    """

    url: str
    key: str = field(default="", repr=False)
    api_key: str = field(default="", repr=False)
    admin_api_key: str = field(default="", repr=False)

    def post(self, path: str, body: object, deadline_s: float | None = API_DEADLINE_S) -> bytes:
        """POST JSON to the server and return the body of the response. Blocks.

        `deadline_s` is None (no limit) only for a request that the server answers when a pause ends.

        Raises:
            PeerTimeout: the server did not answer within `deadline_s`.
            NoSuchRoute: the status is 404.
            PeerUnreachable: the connection failed, or the status is neither 200 nor 404.
        """
        headers = {"Content-Type": "application/json"}
        return self._post(path, msgspec.json.encode(body), headers, deadline_s)

    def send(
        self,
        path: str,
        body: bytes,
        headers: Mapping[str, bytes],
        deadline_s: float = API_DEADLINE_S,
    ) -> bytes:
        """POST bytes with additional `headers` and return the body of the response. Blocks; raises as `post` does."""
        return self._post(path, body, headers, deadline_s)

    def get(self, path: str, deadline_s: float = API_DEADLINE_S) -> bytes:
        """GET a path and return the body of the response. Blocks; raises as `post` does."""
        return self._ask("GET", path, None, {}, self.api_key, deadline_s)

    def _post(
        self, path: str, body: bytes, headers: Mapping[str, str | bytes], deadline_s: float | None
    ) -> bytes:
        """Send a POST request with the admin key, or else the API key; see `post`."""
        key = self.admin_api_key or self.api_key
        return self._ask("POST", path, body, headers, key, deadline_s)

    def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str | bytes],
        api_key: str,
        deadline_s: float | None,
    ) -> bytes:
        """Send a request with the engine's keys, wait for the answer, and return its body.

        Raises:
            NoSuchRoute: the status is 404.
            PeerUnreachable: the status is neither 200 nor 404, or the server cannot be reached.
            PeerTimeout: the server did not answer within `deadline_s`.
        """
        headers = {**headers, KEY_HEADER: self.key}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        with BlockingHttp(self.url, headers, to_controller=False) as server:
            reply = server.ask(method, path, body, deadline_s=deadline_s)
        if reply.status != HTTPStatus.OK:
            kind = NoSuchRoute if reply.status == HTTPStatus.NOT_FOUND else PeerUnreachable
            raise kind(f"{method} {self.url}{path}: {reply.status} {reply.text(LONGEST_ANSWER)}")
        return reply.body
