"""The few lines of HTTP that controller and worker share."""

from __future__ import annotations

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from windlass.errors import ProtocolError
from windlass.net.access import Access, AccessGate
from windlass.rollout.messages import CONTENT_TYPE, Body, BodyT, decode, encode

__all__ = [
    "MAX_BODY_NBYTES",
    "authorization",
    "post",
    "read_body",
    "reply",
    "require_token",
]

MAX_BODY_NBYTES = 1 << 28


def authorization(token: str) -> dict[str, str]:
    """Headers that carry the shared token; none for an empty one."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def require_token(token: str) -> Middleware:
    """Middleware that answers 401 unless the request carries `token`, or what it gives workers."""
    gate = AccessGate.of_secret(token, [Access.WORKER])

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if gate.role_of(request.headers.get("Authorization", "")) is None:
            raise web.HTTPUnauthorized(text="wrong or missing token")
        return await handler(request)

    return check


async def read_body(request: web.Request, kind: type[BodyT]) -> BodyT:
    """Read and decode a body, whatever the app's own limit is: completions are large.

    Raises:
        web.HTTPBadRequest: not such a body.
        web.HTTPRequestEntityTooLarge: over `MAX_BODY_NBYTES`.
    """
    data = bytearray()
    async for chunk in request.content.iter_any():
        data += chunk
        if len(data) > MAX_BODY_NBYTES:
            raise web.HTTPRequestEntityTooLarge(MAX_BODY_NBYTES, len(data))
    try:
        return decode(bytes(data), kind)
    except ProtocolError as error:
        raise web.HTTPBadRequest(text=str(error)) from error


def reply(body: Body, *, status: int = 200) -> web.Response:
    """A response that carries a body."""
    return web.Response(body=encode(body), content_type=CONTENT_TYPE, status=status)


async def post(
    session: aiohttp.ClientSession, url: str, body: Body, answer: type[BodyT], *, deadline_s: float
) -> BodyT:
    """POST a body and decode the answer.

    Raises:
        aiohttp.ClientError: no connection, or a status of 400 and above.
        TimeoutError: no answer within `deadline_s`.
        ProtocolError: an answer of another kind.
    """
    timeout = aiohttp.ClientTimeout(total=deadline_s)
    async with session.post(
        url, data=encode(body), headers={"Content-Type": CONTENT_TYPE}, timeout=timeout
    ) as response:
        response.raise_for_status()
        return decode(await response.read(), answer)
