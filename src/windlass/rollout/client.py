"""What a trainer rank uses to get its batches; blocking, standard library only."""

from __future__ import annotations

import http.client
import threading
import time
from typing import Self
from urllib.parse import urlencode

from windlass.envs import check_token
from windlass.errors import (
    AuthenticationError,
    ConfigError,
    PeerTimeout,
    ProtocolError,
    StaleMessage,
)
from windlass.net.access import authorization
from windlass.net.addresses import check_url
from windlass.net.sockets import open_connection
from windlass.rollout.messages import TrainingBatch, decode

__all__ = ["BatchClient"]

ANSWER_MARGIN_S = 2.0
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0


class BatchClient:
    """Asks the controller for this rank's shard of a step's batch; used by one thread.

    Args:
        url: base URL of the controller.
        token: shared secret.

    Raises:
        ConfigError: not an http(s) URL, or no header can carry the token.
    """

    def __init__(self, url: str, token: str) -> None:
        parts = check_url(url, "BatchClient: url")
        self._url = url
        self._path = parts.path.rstrip("/") + "/v1/batches"
        self._headers = authorization(check_token(token, "BatchClient: token"))
        self._connection: http.client.HTTPConnection | None = None
        self._backoff = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def next_batch(
        self, step: int, rank: int, world_size: int, *, deadline_s: float
    ) -> TrainingBatch:
        """This rank's shard of the step's batch; the answer comes when the batch is there.

        The question may be asked again, so a lost connection is opened again and a
        restarting controller is waited for, within the deadline.

        Raises:
            ConfigError: step < 0, no rank of `world_size`, or one that the controller refused.
            AuthenticationError: wrong token.
            StaleMessage: the controller has forgotten the step.
            PeerTimeout: no batch, or no controller, within `deadline_s`.
        """
        if step < 0:
            raise ConfigError(f"next_batch: step must be >= 0, got {step}")
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"next_batch: rank must be in [0, world_size={world_size}), got {rank}"
            )
        if not deadline_s > 0:
            raise ConfigError(f"next_batch: deadline_s must be > 0, got {deadline_s}")
        ends = time.monotonic() + deadline_s
        backoff, last = FIRST_BACKOFF_S, "no answer"
        while (left := ends - time.monotonic()) > 0:
            query = urlencode(
                {"step": step, "rank": rank, "world_size": world_size, "deadline_s": left}
            )
            try:
                status, body = self._get(f"{self._path}?{query}", left + ANSWER_MARGIN_S)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                last = f"{type(error).__name__}: {error}"
                self._backoff.wait(max(0.0, min(backoff, ends - time.monotonic())))
                backoff = min(2 * backoff, MAX_BACKOFF_S)
                continue
            if status == 200:
                return decode(body, TrainingBatch)
            if status != 504:
                raise _refusal(status, body)
            last = body.decode(errors="replace")
        raise PeerTimeout(
            f"BatchClient: step {step} of {self._url} within {deadline_s} s, got none ({last})"
        )

    def _get(self, target: str, timeout_s: float) -> tuple[int, bytes]:
        if self._connection is None:
            self._connection = open_connection(self._url, timeout_s)
        connection = self._connection
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        connection.timeout = timeout_s
        connection.request("GET", target, headers=self._headers)
        response = connection.getresponse()
        return response.status, response.read()


def _refusal(status: int, body: bytes) -> Exception:
    text = body[:500].decode(errors="replace").replace("\n", " ")
    if status in {401, 403}:
        return AuthenticationError(f"BatchClient: {text}")
    if status == 410:
        return StaleMessage(text)
    if status == 400:
        return ConfigError(text)
    return ProtocolError(f"BatchClient: HTTP {status}: {text}")
