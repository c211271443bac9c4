"""Calls of an engine's own HTTP server."""

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
"""Number of bytes of a refusal that an error quotes: the reason may follow a long beginning."""


class NoSuchRoute(PeerUnreachable):
    """The engine's server has no such route: this release cannot do that."""


@final
@dataclass(frozen=True, slots=True)
class EngineHttp:
    """An engine's own server, and the keys that open its routes.

    Attributes:
        url: address of the server.
        key: key of its private routes, see `windlass.engines.private_routes`.
        api_key: key that the engine itself was started to require; empty for none.
        admin_api_key: the engine's key for routes that change something, if it differs from `api_key`.
    """

    url: str
    key: str = field(default="", repr=False)
    api_key: str = field(default="", repr=False)
    admin_api_key: str = field(default="", repr=False)

    def post(self, path: str, body: object, deadline_s: float | None = API_DEADLINE_S) -> bytes:
        """POST JSON to the engine's own server and return the answer. Blocks.

        `deadline_s` is None only for a call that lasts as long as a pause.

        Raises:
            PeerTimeout: no answer within `deadline_s`.
            NoSuchRoute: 404.
            PeerUnreachable: no connection, or an answer that is not 200.
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
        """POST bytes under additional `headers` and return the answer. Blocks; raises as `post` does."""
        return self._post(path, body, headers, deadline_s)

    def get(self, path: str, deadline_s: float = API_DEADLINE_S) -> bytes:
        """GET from the engine's own server and return the answer. Blocks; raises as `post` does."""
        return self._ask("GET", path, None, {}, self.api_key, deadline_s)

    def _post(
        self, path: str, body: bytes, headers: Mapping[str, str | bytes], deadline_s: float | None
    ) -> bytes:
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
        headers = {**headers, KEY_HEADER: self.key}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        with BlockingHttp(self.url, headers, to_controller=False) as server:
            reply = server.ask(method, path, body, deadline_s=deadline_s)
        if reply.status != HTTPStatus.OK:
            kind = NoSuchRoute if reply.status == HTTPStatus.NOT_FOUND else PeerUnreachable
            raise kind(f"{method} {self.url}{path}: {reply.status} {reply.text(LONGEST_ANSWER)}")
        return reply.body
