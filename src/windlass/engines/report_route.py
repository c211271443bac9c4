"""`POST /windlass/report`: ranks on other hosts than the engine's server send their reports here.

A report (`windlass.engines.rank_reports`) is two headers and a body. One header is the head, in JSON and base64. The
other header proves that the sender knows the server's token, or the token of role engine (derived from the server's
token). Without this proof the server does not read the body.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
from collections import Counter
from http import HTTPStatus
from typing import final

import msgspec

from windlass.engines.private_routes import App, Message, Receive, Send, answer, body_of, route_path
from windlass.engines.rank_reports import (
    HEAD_HEADER,
    PROOF_HEADER,
    REPORT_PATH,
    Report,
    ReportHead,
    is_waited_for,
)
from windlass.net.access import Access, role_token

MAX_BODY_NBYTES = 1 << 26
_UNPROVEN = (
    "the rank must have the token that the server was started with, or the token of role engine derived from it; "
    "the rank has another token"
)


@final
class ReportRoute:
    """ASGI middleware that serves `REPORT_PATH` and passes on all other requests.

    The response is `{}` after the report has been written into the folder that its head names. If this fails, the
    response is `{"error": ...}` with status 400 (not a report), 403 (no proof), 410 (no process waits for the report), or 413
    (body above 64 MiB). If the proof is wrong, the waiting process gets an error in place of the rank's report, so that
    it does not wait until its deadline.

    Args:
        app: application of the engine's server.
        token: token of the server. If the token is empty, this route refuses every report.
    """

    def __init__(self, app: App, token: str) -> None:
        self._app = app
        roles = (Access.OWNER, Access.ENGINE)
        self._tokens = {role_token(token, role) for role in roles} if token else set[str]()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        if not is_post or route_path(scope) != REPORT_PATH:
            await self._app(scope, receive, send)
            return
        status, error = await self._take(scope, receive)
        await answer(send, status, msgspec.json.encode({"error": error} if error else {}))

    async def _take(self, scope: Message, receive: Receive) -> tuple[HTTPStatus, str]:
        """Check a report and write it into its folder. Return the response's status, and the error or an empty text."""
        try:
            head, proof = _head_of(scope)
        except ValueError as error:
            return (
                HTTPStatus.BAD_REQUEST,
                f"{HEAD_HEADER} must contain the head of a report in base64: {error}",
            )
        gone = f"rank {head.rank}: no process waits for its report"
        if not is_waited_for(head):
            return HTTPStatus.GONE, gone
        proven = any(hmac.compare_digest(proof, head.proof(t).encode()) for t in self._tokens)
        if not proven:
            report = Report(head.folder, head.rank, failed=True, body=_UNPROVEN.encode())
        elif head.nbytes > MAX_BODY_NBYTES:
            reason = f"body must be at most {MAX_BODY_NBYTES} bytes, got {head.nbytes}"
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, reason
        else:
            body = await body_of(receive, head.nbytes)
            if hashlib.sha256(body).hexdigest() != head.digest:
                return (
                    HTTPStatus.BAD_REQUEST,
                    f"body must have the length and the digest in {HEAD_HEADER}",
                )
            report = Report(head.folder, head.rank, head.failed, body)
        try:
            await asyncio.to_thread(report.leave)
        except OSError as error:
            return HTTPStatus.GONE, f"{gone}: {error}"
        return (HTTPStatus.OK, "") if proven else (HTTPStatus.FORBIDDEN, _UNPROVEN)


def _head_of(scope: Message) -> tuple[ReportHead, bytes]:
    """Return the head of a report and the proof that the sender knows the token.

    Raises:
        ValueError: a header is missing, occurs twice, or is malformed.
    """
    headers: list[tuple[bytes, bytes]] = list(scope["headers"])
    counts = Counter(name for name, _ in headers)
    names = (HEAD_HEADER.encode(), PROOF_HEADER.encode())
    if any(counts[name] != 1 for name in names):
        raise ValueError(f"{HEAD_HEADER} and {PROOF_HEADER} must be given once each")
    head, proof = (dict(headers)[name] for name in names)
    return msgspec.json.decode(base64.b64decode(head, validate=True), type=ReportHead), proof
