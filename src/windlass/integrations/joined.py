"""Servers that join a trainer's controller by `POST /windlass/join`: Windlass is installed, WINDLASS_CONTROLLER is `wait`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import final

from windlass.engines.http import EngineHttp, NoSuchRoute
from windlass.engines.join_route import JOIN_PATH, JoinOrder
from windlass.envs import control_token
from windlass.errors import EngineRefused, PeerUnreachable, WindlassError
from windlass.integrations.hosted import HostedController
from windlass.net.access import Access
from windlass.net.addresses import check_url

__all__ = ["JoinedServers", "server_name"]

PROBE_S = 2.0
"""Seconds within which a server outside the fleet must answer before an update continues without it."""


def server_name(url: str) -> str:
    """Return the name in the fleet of the server at a URL; a restarted server has the same name.

    Raises:
        ConfigError: the URL is not a valid HTTP URL.
    """
    parts = check_url(url, "servers")
    return f"{parts.hostname}:{parts.port or parts.scheme}"


@final
class JoinedServers:
    """Controller that rank 0 hosts, and the servers that join it. A `ServerFleet`.

    Args:
        urls: URLs of the servers.
        transport: transport through which the servers receive weights; see `JoinOrder`.

    Raises:
        ConfigError: neither WINDLASS_TOKEN nor WINDLASS_TOKEN_FILE is set, or a URL is invalid.
        PeerUnreachable: this host has no route to the servers.
    """

    def __init__(self, urls: Sequence[str], transport: str = "auto") -> None:
        self._token, self.urls, self._transport = control_token(), urls, transport
        self.hosted = HostedController(urls)

    def join(self, deadline_s: float) -> None:
        """Make all missing servers join in parallel, and wait until all servers are in the fleet.

        Raises:
            EngineRefused: a server has no route for joining, or cannot be updated; the message has the reason.
            PeerUnreachable: a server could not be reached, or refused the order; the message has the reason.
            PeerTimeout: a server did not answer or join within `deadline_s`.
        """
        for error in self._ask(self._missing(), deadline_s).values():
            raise error
        self.hosted.wait_for_fleet([server_name(url) for url in self.urls], deadline_s)

    def rejoin(self, deadline_s: float) -> Mapping[str, str]:
        """Make all missing servers join in parallel, and return failures as URL -> reason.

        Raises:
            PeerUnreachable: no server is in the fleet.
        """
        failed = self._ask(self._missing(), deadline_s, is_probed=True)
        reasons = {url: f"{type(error).__name__}: {error}" for url, error in failed.items()}
        if len(reasons) == len(self.urls):
            raise PeerUnreachable(f"servers: none could join: {'; '.join(reasons.values())}")
        return reasons

    def wait_resumed(self, names: Collection[str]) -> None:
        """Do nothing: the round resumes the servers itself."""

    def _missing(self) -> list[str]:
        names = {server_name(url): url for url in self.urls}
        return [names[name] for name in self.hosted.missing([*names])]

    def _ask(
        self, urls: Sequence[str], deadline_s: float, *, is_probed: bool = False
    ) -> dict[str, WindlassError]:
        """Send the order to join to all `urls` in parallel, and return failures as URL -> error.

        Args:
            urls: URLs of the servers.
            deadline_s: seconds within which each server must join.
            is_probed: whether to check first that a server answers within `PROBE_S`. If it does not, send no order.
        """
        address, failed = self.hosted.address(Access.ENGINE), dict[str, WindlassError]()

        def ask(url: str) -> None:
            http = EngineHttp(url, api_key=self._token)
            order = JoinOrder(
                address.url, self._transport, token=address.token, name=server_name(url)
            )
            try:
                if is_probed:
                    with suppress(NoSuchRoute):
                        http.get("/model_info", PROBE_S)
                http.post(JOIN_PATH, order, deadline_s)
            except NoSuchRoute as error:
                failed[url] = EngineRefused(
                    f"{url} must be an SGLang server with Windlass installed and WINDLASS_CONTROLLER=wait: {error}"
                )
            except WindlassError as error:
                failed[url] = error

        if urls:
            with ThreadPoolExecutor(len(urls), "windlass-join") as pool:
                [*pool.map(ask, urls)]
        return failed

    def close(self) -> None:
        """Close the controller. Idempotent."""
        self.hosted.close()
