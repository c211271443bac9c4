"""Requests that commands send to a running controller, and the options with the controller's address."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import msgspec

from windlass.envs import control_token
from windlass.errors import AuthenticationError, PeerTimeout, PeerUnreachable, ProtocolError
from windlass.net.addresses import check_url
from windlass.net.sockets import connection_error, open_http
from windlass.observability.operations import HEARTBEAT_S

_OF_AN_OVERVIEW = {"published_version", "engines", "links", "rounds", "rollouts", "staleness"}
"""Keys of `/v1/overview` that every controller sends."""


def add_controller(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments for the controller's address and the deadline. The token comes from WINDLASS_TOKEN."""
    parser.add_argument("url", help="address of the controller")
    parser.add_argument(
        "--deadline-s",
        type=float,
        default=10.0,
        help="seconds that the controller has to answer (default 10)",
    )


def overview(args: argparse.Namespace) -> dict[str, Any]:
    """Fetch and return the overview of the controller at `args.url`, decoded from JSON.

    Raises:
        ConfigError, AuthenticationError, PeerTimeout, PeerUnreachable, ProtocolError: see `fetch_overview`.
    """
    return asyncio.run(fetch_overview(args.url.rstrip("/"), control_token(), args.deadline_s))


async def fetch_overview(url: str, token: str, deadline_s: float) -> dict[str, Any]:
    """Fetch and return `/v1/overview` of the controller at `url`, decoded from JSON.

    Raises:
        ConfigError: `url` is not the URL of a server; see also `client_context`.
        AuthenticationError: the token is wrong, or its role may not read the overview.
        PeerTimeout, PeerUnreachable: the server did not answer.
        ProtocolError: the server is not a controller.
    """
    with _errors_of(url, deadline_s):
        async with (
            asyncio.timeout(deadline_s),
            open_http(token, to_controller=True) as session,
            session.get(f"{url}/v1/overview") as answer,
        ):
            await _check(url, answer)
            return _decode(url, await answer.read())


async def follow_overview(
    url: str, token: str, deadline_s: float
) -> AsyncGenerator[dict[str, Any]]:
    """Yield each overview that the controller at `url` sends on `/v1/events`, until the controller ends the stream.

    The controller sends data at least every `HEARTBEAT_S` seconds.

    Raises:
        PeerTimeout: the first data did not arrive within `deadline_s`, or later data did not arrive for
            `3 * HEARTBEAT_S` seconds.
        PeerUnreachable: the connection broke, or the controller did not answer.
        ConfigError, AuthenticationError, ProtocolError: see `fetch_overview`.
    """
    longest_s, has_begun = 3 * HEARTBEAT_S, False
    try:
        with _errors_of(url, deadline_s):
            async with (
                open_http(token, to_controller=True, many_connections=True) as session,
                asyncio.timeout(deadline_s) as timeout,
                session.get(f"{url}/v1/events") as answer,
            ):
                await _check(url, answer)
                loop, frame = asyncio.get_running_loop(), b""
                while chunk := await answer.content.readany():
                    has_begun = True
                    timeout.reschedule(loop.time() + longest_s)
                    *frames, frame = (frame + chunk).split(b"\n\n")
                    for whole in frames:
                        if whole.startswith(b"data: "):
                            yield _decode(url, whole[6:])
    except PeerTimeout:
        if has_begun:
            raise PeerTimeout(f"{url}: the controller sent nothing for {longest_s:g} s") from None
        raise


async def _check(url: str, answer: aiohttp.ClientResponse) -> None:
    if answer.status == 401:
        raise AuthenticationError(f"{url}: wrong WINDLASS_TOKEN")
    if answer.status == 403:
        said = (await answer.content.read(200)).decode(errors="replace")
        raise AuthenticationError(f"{url}: {said}")
    if answer.status != 200:
        raise _no_controller(
            f"{url}: the server answered with status {answer.status}; is this server a controller?"
        )


def _decode(url: str, answer: bytes) -> dict[str, Any]:
    """Decode a controller's answer.

    Raises:
        MsgspecError: the answer is not a JSON object.
        ProtocolError: the answer lacks a key of an overview.
    """
    found = msgspec.json.decode(answer, type=dict[str, Any])
    if lacking := sorted(_OF_AN_OVERVIEW - found.keys()):
        raise _no_controller(
            f"{url}: the answer lacks {', '.join(lacking)}; is this server a controller?"
        )
    return found


def _no_controller(said: str) -> ProtocolError:
    error = ProtocolError(said)
    error.add_note(
        "next: give the address that `windlass serve` or `windlass launch` prints, not an engine's address"
    )
    return error


@contextmanager
def _errors_of(url: str, deadline_s: float) -> Iterator[None]:
    check_url(url, "controller")
    try:
        yield
    except TimeoutError:
        timeout = PeerTimeout(f"{url}: no answer within {deadline_s} s")
        timeout.add_note(
            "next: check that a controller runs at this address, or set a longer --deadline-s"
        )
        raise timeout from None
    except aiohttp.ClientError as error:
        raise PeerUnreachable(f"{url}: {connection_error(error)}") from error
    except msgspec.MsgspecError as error:
        raise _no_controller(f"{url}: {error}") from error
