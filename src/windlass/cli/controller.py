"""Commands that ask a running controller: its address on the command line, and what it answers."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import aiohttp
import msgspec

from windlass.envs import control_token
from windlass.errors import AuthenticationError, PeerTimeout, PeerUnreachable, ProtocolError
from windlass.net.addresses import check_url
from windlass.net.sockets import open_http


def add_controller(parser: argparse.ArgumentParser) -> None:
    """Declare the controller; the token comes from WINDLASS_TOKEN, never from the command line."""
    parser.add_argument("url", help="address of the controller")
    parser.add_argument("--deadline-s", type=float, default=10.0)


def overview(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the controller of `add_controller` knows; raises as `fetch_overview` does."""
    return asyncio.run(fetch_overview(args.url.rstrip("/"), control_token(), args.deadline_s))


async def fetch_overview(url: str, token: str, deadline_s: float) -> dict[str, Any]:
    """What `/v1/overview` of a controller answers.

    Raises:
        ConfigError: no URL of a server. AuthenticationError: wrong token. PeerTimeout, PeerUnreachable: no answer.
        ProtocolError: an answer that is none of a controller.
    """
    check_url(url, "controller")
    try:
        async with (
            asyncio.timeout(deadline_s),
            open_http(token) as session,
            session.get(f"{url}/v1/overview") as answer,
        ):
            body = await answer.read()
            if answer.status == 401:
                raise AuthenticationError(f"{url}: wrong WINDLASS_TOKEN")
            if answer.status == 403:
                said = body[:200].decode(errors="replace")
                raise AuthenticationError(f"{url}: {said}")
            if answer.status != 200:
                raise ProtocolError(f"{url}: answered {answer.status}, is it a controller?")
            return msgspec.json.decode(body, type=dict[str, Any])
    except TimeoutError:
        raise PeerTimeout(f"{url}: no answer within {deadline_s} s") from None
    except aiohttp.ClientError as error:
        raise PeerUnreachable(f"{url}: {error}") from error
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"{url}: {error}") from error
