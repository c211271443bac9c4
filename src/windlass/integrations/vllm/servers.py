"""Client of vLLM's own routes for weight updates; it calls several servers in parallel.

vLLM defines the routes in `vllm/entrypoints/serve/dev/rlhf/api_router.py` (0.24) and
`vllm/entrypoints/rl/online/api_router.py` (0.32). A server has these routes only with VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import final

import msgspec

from windlass.engines.http import EngineHttp, NoSuchRoute
from windlass.engines.vllm.engine_core import WHOLE
from windlass.errors import ConfigError, PeerUnreachable, WindlassError
from windlass.net.addresses import check_url
from windlass.net.clock import Backoff

__all__ = ["PAUSE_MODES", "VllmServers"]

logger = logging.getLogger(__name__)
BACKOFF = Backoff(0.1, 2.0)
FLAG = """--weight-transfer-config '{"backend": "windlass"}'"""
PAUSE_MODES = ("abort", "wait", "keep")
"""Modes of `/pause`. Running requests end (`abort`), finish first (`wait`), or continue after the pause (`keep`)."""


class _WorldSize(msgspec.Struct, frozen=True):
    world_size: int


def server_urls(urls: Sequence[str]) -> tuple[str, ...]:
    """Check the URLs and return them without trailing slashes.

    Raises:
        ConfigError: `urls` is empty, contains an invalid URL, or contains a URL twice.
    """
    if isinstance(urls, str) or not urls:
        raise ConfigError(f"servers: must be a sequence of one URL or more, got {urls!r}")
    found = tuple(url.rstrip("/") for url in urls)
    for url in found:
        check_url(url, "servers")
    if len({*found}) < len(found):
        raise ConfigError(f"servers: each URL must occur once, got {list(found)}")
    return found


@final
class VllmServers:
    """Client of servers that were started with `--weight-transfer-config '{"backend": "windlass"}'`.

    Every method blocks. Calls to several servers run in parallel. `world_size` and `init_weight_transfer_engine` raise
    an error if a server fails. All other methods log failures and return them as URL -> reason, so that a dead server
    does not stop the update of other servers.

    Args:
        urls: URLs of the servers.
        api_key: API key of the servers; empty if they require none.

    Raises:
        ConfigError: `urls` is empty, contains an invalid URL, or contains a URL twice.
    """

    def __init__(self, urls: Sequence[str], *, api_key: str = "") -> None:
        self.urls = server_urls(urls)
        self._http = {url: EngineHttp(url, api_key=api_key) for url in self.urls}
        # Two threads per server: while `/update_weights` blocks one thread, the other can call further routes.
        self._pool = ThreadPoolExecutor(2 * len(self.urls), "windlass-vllm")

    def world_size(self, url: str, deadline_s: float, *, listens_within_s: float = 0.0) -> int:
        """Return the number of ranks of a server, over all its data-parallel replicas.

        Args:
            url: URL of the server.
            deadline_s: seconds within which the server must answer.
            listens_within_s: seconds to wait for a server that does not listen yet.

        Raises:
            PeerUnreachable: the server does not listen, cannot be reached, or lacks the route `/get_world_size`.
            PeerTimeout: the server does not answer within `deadline_s`.
        """
        gives_up_at = time.monotonic() + listens_within_s
        try:
            answer = self._when_listening(url, deadline_s, gives_up_at)
        except PeerUnreachable as error:
            if not listens_within_s or not isinstance(error.__cause__, ConnectionRefusedError):
                raise
            raise PeerUnreachable(
                f"{url}: the server did not listen within {listens_within_s:.3g} s; check that it runs, and read "
                f"its log: {error}"
            ) from error
        except NoSuchRoute as error:
            raise PeerUnreachable(
                f"{url}: the server must be started with VLLM_SERVER_DEV_MODE=1 in its environment: {error}"
            ) from error
        return msgspec.json.decode(answer, type=_WorldSize).world_size

    def _when_listening(self, url: str, deadline_s: float, gives_up_at: float) -> bytes:
        """Return the answer to `/get_world_size`. Retry while the server does not listen, until `gives_up_at` (monotonic)."""
        is_logged, pauses = False, BACKOFF.pauses()
        while True:
            try:
                return self._http[url].get("/get_world_size", deadline_s)
            except PeerUnreachable as error:
                left_s = gives_up_at - time.monotonic()
                if left_s <= 0 or not isinstance(error.__cause__, ConnectionRefusedError):
                    raise
            if not is_logged:
                logger.info(
                    "waiting for %s, which does not listen yet: at most %.0f s", url, left_s
                )
            is_logged = True
            time.sleep(min(next(pauses), left_s))

    def init_weight_transfer_engine(
        self, init_info: Mapping[str, Mapping[str, object]], deadline_s: float
    ) -> None:
        """POST `/init_weight_transfer_engine` to the servers in `init_info`, each with its own body.

        Args:
            init_info: body for each URL.
            deadline_s: seconds within which each server must answer.

        Raises:
            PeerUnreachable: a server could not be reached, did not answer, or refused; the message has each reason.
        """
        reasons = self._post(
            "/init_weight_transfer_engine",
            init_info,
            lambda url: {"init_info": init_info[url]},
            deadline_s,
        )
        if reasons:
            what_to_do = (
                f"; start the server with {FLAG}" if _lacks_backend(reasons.values()) else ""
            )
            raise PeerUnreachable("; ".join(reasons.values()) + what_to_do)

    def pause(self, among: Collection[str], mode: str, deadline_s: float) -> dict[str, str]:
        """POST `/pause?mode=...` and return failures as URL -> reason.

        vLLM need not clear its prefix cache: Windlass separates the cache entries of different versions.

        Args:
            among: URLs of the servers to pause.
            mode: one of `PAUSE_MODES`.
            deadline_s: seconds within which each server must answer.

        Raises:
            ConfigError: `mode` is not one of `PAUSE_MODES`.
        """
        if mode not in PAUSE_MODES:
            raise ConfigError(f"pause: must be one of {PAUSE_MODES}, got {mode!r}")
        path = f"/pause?mode={mode}&clear_cache=false"
        return self._post(path, among, _nothing, deadline_s)

    def resume(self, among: Collection[str], deadline_s: float) -> dict[str, str]:
        """POST `/resume` and return failures as URL -> reason."""
        return self._post("/resume", among, _nothing, deadline_s)

    def update_weights(
        self, among: Collection[str], version: int, deadline_s: float, *, held_s: float
    ) -> dict[str, str]:
        """POST `/update_weights` and return failures as URL -> reason.

        A server answers when the round of `version` has ended. Until then its workers run no step. The routes
        `/start_weight_update` and `/finish_weight_update` are not needed. After the call, vLLM 0.32 labels new tokens
        with the version that the server serves.

        Args:
            among: URLs of the servers to update.
            version: version that the trainer is about to publish.
            deadline_s: seconds within which each server must answer.
            held_s: seconds that a worker waits for the round to begin. If the round has not begun by then, the worker
                continues without the update.
        """
        body = {"update_info": {"version": version, "deadline_s": held_s, WHOLE: True}}
        return self._post("/update_weights", among, lambda _url: body, deadline_s)

    def shutdown_weight_transfer_engine(
        self, among: Collection[str], deadline_s: float
    ) -> dict[str, str]:
        """POST `/shutdown_weight_transfer_engine` and return failures as URL -> reason.

        A server without this route (vLLM 0.24) is not a failure.
        """
        return self._post(
            "/shutdown_weight_transfer_engine", among, _nothing, deadline_s, may_lack=True
        )

    def close(self) -> None:
        """Cancel calls that have not started, and do not wait for running calls. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _post(
        self,
        path: str,
        among: Iterable[str],
        body: Callable[[str], object],
        deadline_s: float,
        *,
        may_lack: bool = False,
    ) -> dict[str, str]:
        """POST to all servers in parallel and return failures as URL -> reason.

        Args:
            path: path of the route.
            among: URLs of the servers.
            body: function that returns the body for a URL.
            deadline_s: seconds within which each server must answer.
            may_lack: whether a server without this route counts as success.
        """

        def post(url: str) -> str:
            try:
                self._http[url].post(path, body(url), deadline_s)
            except NoSuchRoute as error:
                return "" if may_lack else str(error)
            except WindlassError as error:
                return str(error)
            return ""

        asked = tuple(among)
        answers = dict(zip(asked, self._pool.map(post, asked), strict=True))
        reasons = {url: reason for url, reason in answers.items() if reason}
        for reason in reasons.values():
            logger.warning("%s", reason)
        return reasons


def _lacks_backend(reasons: Iterable[str]) -> bool:
    """Return whether one of the servers' error texts shows that a server does not have the backend "windlass"."""
    return any("transfer not configured" in told or "Invalid init_info" in told for told in reasons)


def _nothing(_url: str) -> object:
    """Return an empty JSON object, as the request body for every server."""
    return {}
