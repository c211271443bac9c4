"""vLLM's own routes for weight updates, of several servers side by side.

In 0.24 `vllm/entrypoints/serve/dev/rlhf/api_router.py`, in 0.32 `vllm/entrypoints/rl/online/api_router.py`;
a server has them with VLLM_SERVER_DEV_MODE=1.
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
"""Of `/pause`: running requests end, are waited for, or go on afterwards where they are."""


class _WorldSize(msgspec.Struct, frozen=True):
    world_size: int


def server_urls(urls: Sequence[str]) -> tuple[str, ...]:
    """Return the URLs without a slash at their end.

    Raises:
        ConfigError: no URL, one that is none, or one twice.
    """
    if isinstance(urls, str) or not urls:
        raise ConfigError(f"servers: must be a sequence of one URL or more, got {urls!r}")
    found = tuple(url.rstrip("/") for url in urls)
    for url in found:
        check_url(url, "servers")
    if len({*found}) < len(found):
        raise ConfigError(f"servers: each must be given once, got {list(found)}")
    return found


@final
class VllmServers:
    """Servers that were started with `--weight-transfer-config '{"backend": "windlass"}'`.

    Calls go to all servers at once and block. But for `init_weight_transfer_engine` they return, and
    log, why a server could not be asked, by URL: one that has died must not keep the others.

    Args:
        urls: of the servers.
        api_key: what they were started to ask for; empty for nothing.

    Raises:
        ConfigError: no URL, one that is none, or one twice.
    """

    def __init__(self, urls: Sequence[str], *, api_key: str = "") -> None:
        self.urls = server_urls(urls)
        self._http = {url: EngineHttp(url, api_key=api_key) for url in self.urls}
        # One thread more for each: a call may last as long as weights are mixed.
        self._pool = ThreadPoolExecutor(2 * len(self.urls), "windlass-vllm")

    def world_size(self, url: str, deadline_s: float, *, listens_within_s: float = 0.0) -> int:
        """Return the number of ranks of a server, replicas included.

        Args:
            url: the server.
            deadline_s: for its answer.
            listens_within_s: for a server that still starts to listen.

        Raises:
            PeerUnreachable, PeerTimeout: the server does not listen, does not answer, or has no such route.
        """
        gives_up_at = time.monotonic() + listens_within_s
        try:
            answer = self._when_listening(url, deadline_s, gives_up_at)
        except PeerUnreachable as error:
            if not listens_within_s or not isinstance(error.__cause__, ConnectionRefusedError):
                raise
            raise PeerUnreachable(
                f"{url}: must listen within {listens_within_s:g} s, and did not; see that the server runs and "
                f"what its log says: {error}"
            ) from error
        except NoSuchRoute as error:
            raise PeerUnreachable(
                f"{url}: must be started with VLLM_SERVER_DEV_MODE=1 in its environment: {error}"
            ) from error
        return msgspec.json.decode(answer, type=_WorldSize).world_size

    def _when_listening(self, url: str, deadline_s: float, gives_up_at: float) -> bytes:
        """GET the world size, again and again until the server listens: nothing can signal that it does."""
        is_told, pauses = False, BACKOFF.pauses()
        while True:
            try:
                return self._http[url].get("/get_world_size", deadline_s)
            except PeerUnreachable as error:
                left_s = gives_up_at - time.monotonic()
                if left_s <= 0 or not isinstance(error.__cause__, ConnectionRefusedError):
                    raise
            if not is_told:
                logger.info(
                    "waiting for %s, which does not listen yet: at most %.0f s", url, left_s
                )
            is_told = True
            time.sleep(min(next(pauses), left_s))

    def init_weight_transfer_engine(
        self, init_info: Mapping[str, Mapping[str, object]], deadline_s: float
    ) -> None:
        """POST `/init_weight_transfer_engine` to the servers named, each with its own body.

        Args:
            init_info: by URL.
            deadline_s: for each to answer.

        Raises:
            PeerUnreachable: a server could not be reached, or refused; quotes each reason.
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
        """POST `/pause?mode=...`; vLLM's caches are not cleared: they are kept apart by version.

        Args:
            among: the URLs that are asked.
            mode: one of `PAUSE_MODES`.
            deadline_s: for each.

        Raises:
            ConfigError: no such mode.
        """
        if mode not in PAUSE_MODES:
            raise ConfigError(f"pause: must be one of {PAUSE_MODES}, got {mode!r}")
        path = f"/pause?mode={mode}&clear_cache=false"
        return self._post(path, among, _nothing, deadline_s)

    def resume(self, among: Collection[str], deadline_s: float) -> dict[str, str]:
        """POST `/resume`."""
        return self._post("/resume", among, _nothing, deadline_s)

    def update_weights(
        self, among: Collection[str], version: int, deadline_s: float, *, held_s: float
    ) -> dict[str, str]:
        """POST `/update_weights`: hold every worker until the round of `version` has ended.

        This is the whole update: `/start_weight_update` and `/finish_weight_update` are of no use around it. Tokens are
        stamped with the version that is served after it, where vLLM does so (0.32).

        Args:
            among: the URLs that are asked.
            version: that comes.
            deadline_s: for each to answer, which they do after the round.
            held_s: for the round to reach a worker; it is let go if none does.
        """
        body = {"update_info": {"version": version, "deadline_s": held_s, WHOLE: True}}
        return self._post("/update_weights", among, lambda _url: body, deadline_s)

    def shutdown_weight_transfer_engine(
        self, among: Collection[str], deadline_s: float
    ) -> dict[str, str]:
        """POST `/shutdown_weight_transfer_engine`, where the release has it (0.32)."""
        return self._post(
            "/shutdown_weight_transfer_engine", among, _nothing, deadline_s, may_lack=True
        )

    def close(self) -> None:
        """Wait for no call that is under way. Idempotent."""
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
        """POST the body of each URL, side by side; `may_lack`: a release may have no such route."""

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
    """Return whether a server has no weight-transfer backend, or another one than ours."""
    return any("transfer not configured" in told or "Invalid init_info" in told for told in reasons)


def _nothing(_url: str) -> object:
    return {}
