"""Client for agents in Python: claim a rollout, and set its reward. Agents in other languages send the same requests."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import msgspec

from windlass.errors import (
    DECODE_ERRORS,
    AuthenticationError,
    ConfigError,
    PeerTimeout,
    PeerUnreachable,
    ProtocolError,
)
from windlass.net.access import authorization
from windlass.net.addresses import check_url
from windlass.net.blocking_http import BlockingHttp, HttpReply
from windlass.net.clock import Backoff

BACKOFF = Backoff(0.1, 2.0)
ASK_EVERY_S = 60.0
"""Longest time that one request of `claim_rollout` waits for a rollout. A longer wait takes several requests."""
MARGIN_S = 5.0
"""Seconds that the client waits for an answer beyond the time that is left."""


class Claimed(msgspec.Struct, frozen=True):
    """Rollout that this agent runs.

    Attributes:
        id: id of the session.
        base_url, api_key: settings of the agent's OpenAI client.
        task_id, attempt: identity of the attempt. A tool that stores state must store it under both values.
        arguments: arguments of the submission.
    """

    id: str
    base_url: str
    api_key: str
    task_id: str
    attempt: int
    arguments: Any = None


def claim_rollout(base_url: str, agent_token: str, *, deadline_s: float) -> Claimed:
    """Wait for a rollout of the workflow `agent`, and claim it.

    Args:
        base_url: address of a worker's endpoint, which ends with `/v1`.
        agent_token: token of role agent; `windlass token agent` prints it.
        deadline_s: seconds to wait.

    Raises:
        AuthenticationError: wrong token.
        ConfigError: `base_url` is not a URL.
        PeerTimeout: no rollout was offered, or the endpoint did not answer, within `deadline_s`.
        ProtocolError: the endpoint refused the request.
    """

    def body(left_s: float) -> object:
        return {"deadline_s": min(left_s, ASK_EVERY_S)}

    reply = _ask(base_url, "/sessions", agent_token, body, deadline_s=deadline_s)
    try:
        return msgspec.json.decode(reply.body, type=Claimed)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"{base_url}: {error}") from error


def set_reward(
    base_url: str,
    api_key: str,
    reward: float,
    *,
    metadata: object = None,
    deadline_s: float = 30.0,
) -> None:
    """Set the reward of a session, and close the session. Repeat the request until the endpoint answers it.

    Args:
        base_url: address of the session's endpoint; the agent's OpenAI client has the same `base_url`.
        api_key: key of the session; the agent's OpenAI client has the same `api_key`.
        reward: finite number.
        metadata: value that JSON can represent. The rollout's value contains it as `metadata`.
        deadline_s: seconds to wait for the endpoint.

    Raises:
        AuthenticationError: the key is wrong, or the session ended without this reward.
        ConfigError: `base_url` is not a URL, or JSON cannot represent the metadata.
        PeerTimeout: the endpoint did not answer within `deadline_s`.
        ProtocolError: the endpoint refused the reward or the metadata.
    """
    session_id = "".join(api_key.split("-")[2:3])
    path, body = f"/sessions/{session_id}/reward", {"reward": float(reward), "metadata": metadata}
    try:
        msgspec.json.encode(body)
    except (TypeError, OverflowError, ValueError) as error:
        raise ConfigError(f"set_reward: metadata must be a JSON value: {error}") from error
    _ask(base_url, path, api_key, lambda _: body, deadline_s=deadline_s)


def _ask(
    base_url: str, path: str, token: str, body: Callable[[float], object], *, deadline_s: float
) -> HttpReply:
    """Repeat a POST request until its status is 200, and return the reply. For the errors, see `set_reward`.

    `body` returns the body of one request; its argument is the number of seconds that are left.
    """
    check_url(base_url, "base_url")
    ends, pauses, last = time.monotonic() + deadline_s, BACKOFF.pauses(), "no answer"
    http = BlockingHttp(base_url, authorization(token), to_controller=False)
    with contextlib.closing(http):
        while (left_s := ends - time.monotonic()) > 0:
            encoded = msgspec.json.encode(body(left_s))
            try:
                reply = http.ask("POST", path, encoded, deadline_s=left_s + MARGIN_S)
            except (PeerTimeout, PeerUnreachable) as error:
                last = str(error)
            else:
                if reply.status == 200:
                    return reply
                last = reply.text(500)
                if reply.status in {401, 403}:
                    raise AuthenticationError(last)
                if reply.status < 500 and reply.status not in {408, 429}:
                    raise ProtocolError(f"{base_url}{path}: HTTP {reply.status}: {last}")
            time.sleep(max(0.0, min(next(pauses), ends - time.monotonic())))
    raise PeerTimeout(f"{base_url}{path}: not answered within {deadline_s:g} s ({last})")
