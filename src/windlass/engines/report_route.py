"""`POST /windlass/report`: ranks on other hosts than an engine's server tell it what they have to report.

See `windlass.engines.rank_reports`. The body is a `Report` in JSON, whose proof is of the token that the server was started
with, or of the one of role engine that follows from it.
"""

from __future__ import annotations

import asyncio
import hmac
from http import HTTPStatus
from typing import final

import msgspec

from windlass.engines.private_routes import (
    App,
    Message,
    Receive,
    Refusal,
    Send,
    answer,
    read_json,
)
from windlass.engines.rank_reports import REPORT_PATH, Report, is_waited_for
from windlass.envs import control_token
from windlass.net.access import Access, role_token

MAX_BODY_NBYTES = 1 << 26
_UNPROVEN = "a rank must have the token that the server was started with, or the one of role engine; it has another"


@final
class ReportRoute:
    """ASGI middleware in front of an engine's server; it answers one route, and passes on the others.

    The answer is `{}` once the report lies where it is waited for; else `{"error": ...}`, with 400 for what is
    no report, 403 for one without proof, 410 where nobody waits for it, and 413 for a body above 64 MiB. Whoever
    waits hears of one without proof, and that alone: a rank that has another token would be waited for in vain.

    Args:
        app: the engine's.
        token: of the server; empty for none, and then nothing is proven; None for the one of its environment.

    Raises:
        ConfigError: see `control_token`.
    """

    def __init__(self, app: App, token: str | None = None) -> None:
        token = control_token() if token is None else token
        self._app = app
        roles = (Access.OWNER, Access.ENGINE)
        self._tokens = {role_token(token, role) for role in roles} if token else set[str]()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        is_http = scope["type"] == "http"
        if not is_http or (scope["method"], scope["path"]) != ("POST", REPORT_PATH):
            await self._app(scope, receive, send)
            return
        status, error = await self._take(receive)
        await answer(send, status, msgspec.json.encode({"error": error} if error else {}))

    async def _take(self, receive: Receive) -> tuple[HTTPStatus, str]:
        report = await read_json(receive, Report, MAX_BODY_NBYTES, "a report")
        if isinstance(report, Refusal):
            return report
        if not is_waited_for(report):
            return HTTPStatus.GONE, f"rank {report.rank}: nobody waits for its report"
        proofs = [report.proven_by(token).proof.encode() for token in self._tokens]
        proven = any(hmac.compare_digest(report.proof.encode(), proof) for proof in proofs)
        if not proven:
            report = Report(report.folder, report.rank, failed=True, body=_UNPROVEN.encode())
        try:
            await asyncio.to_thread(report.leave)
        except OSError as error:
            return HTTPStatus.GONE, f"rank {report.rank}: nobody waits for its report: {error}"
        return (HTTPStatus.OK, "") if proven else (HTTPStatus.FORBIDDEN, _UNPROVEN)
