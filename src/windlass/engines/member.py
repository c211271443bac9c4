"""Join of an engine server to the fleet of a controller. The plugins of vLLM and SGLang use this module."""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import threading
from abc import ABC, abstractmethod
from contextlib import ExitStack

import msgspec

from windlass.control.engine_channel import report_cannot_join
from windlass.engines.join_route import JoinOrder
from windlass.engines.private_routes import new_key
from windlass.envs import CONTROLLER_VARIABLE, control_token, environment_value
from windlass.errors import ConfigError, ProtocolError, WindlassError
from windlass.net.addresses import (
    check_url,
    is_loopback,
    is_this_host,
    is_wildcard,
    join_host_port,
    own_address,
    url_of,
)
from windlass.progress import Progress

WAIT = "wait"
"""Value of WINDLASS_CONTROLLER for a server that joins when `POST /windlass/join` names a controller."""
_log = logging.getLogger(__name__)


def keep_key(port: int) -> str:
    """Create the key of this process's server and return the key. Delete the key's file when the process ends.

    Raises:
        ConfigError: another user owns the folder of the keys, or can read it.
    """
    kept = ExitStack()
    key = kept.enter_context(new_key(port))
    atexit.register(kept.close)
    return key


class Member(ABC):
    """Engine server of this process, which can join the fleet of a controller.

    Attributes:
        controller: value of WINDLASS_CONTROLLER.
        token: token of the server; it opens `POST /windlass/join`.
        key: key of the server's private routes; the server's ranks send it with each request.
        port: port that the server listens on.

    Args:
        host: address that the server listens on.
        port: port that the server listens on.
        key: key of the server's private routes; see `keep_key`.
        spans_hosts: whether ranks on other hosts must reach the server.
        transport: transport of a server that joins the fleet of WINDLASS_CONTROLLER by itself.

    Raises:
        ConfigError: the token is missing (see `control_token`), the controller's URL is invalid, or the server
            listens on a loopback address although the controller or a rank is on another host.
        PeerUnreachable: this host has no address from which it reaches the controller.
    """

    def __init__(
        self, host: str, port: int, *, key: str, spans_hosts: bool, transport: str = "auto"
    ) -> None:
        self._transport = transport
        self.controller = environment_value(CONTROLLER_VARIABLE)
        self.token = control_token()
        self._listens_on, self.port, self._spans_hosts = host, port, spans_hosts
        if self.controller != WAIT:
            check_url(self.controller, CONTROLLER_VARIABLE)
            self.url_for(self.controller)
        elif not self.token:
            _log.warning(
                "without a token, only a process of this user on this host can order this server to join"
            )
        self.key = key
        self._is_joining = threading.Lock()

    def join_at_start(self) -> None:
        """Join the fleet of WINDLASS_CONTROLLER in a new thread. If the join fails, end the server."""

        def join() -> None:
            try:
                self.join(JoinOrder(self.controller, self._transport))
            except WindlassError as error:
                self._give_up(f"{type(error).__name__}: {error}")

        threading.Thread(target=join, name="windlass-join", daemon=True).start()

    def _give_up(self, reason: str) -> None:
        """Report the reason to the controller and on stderr, and end the server, because it would get no updates."""
        name = self.name_for(self.controller)
        sys.stderr.write(f"engine {name}: {reason}\n")
        sys.stderr.flush()
        with contextlib.suppress(WindlassError):
            report_cannot_join(self.controller, self.token, name, reason)
        self._end_server()

    def join(self, order: JoinOrder) -> str:
        """Order every rank to leave its previous fleet and join a new one. Wait for the joins, and return the engine's name.

        Raises:
            ProtocolError: another join is in progress.
            ConfigError: the order is not valid for this server, or this host does not have the checkpoint.
            WindlassError: a rank failed or did not answer in time.
        """
        if not self._is_joining.acquire(blocking=False):
            raise ProtocolError(
                "join: another join of this engine is in progress; try again after its end"
            )
        try:
            check_url(order.controller, "controller")
            if self._spans_hosts and order.token not in ("", self.token):
                raise ConfigError(
                    "token must be empty or the server's own token if the server spans several hosts, because ranks on "
                    "other hosts use the token with which they were started"
                )
            name = order.name or self.name_for(order.controller)
            url = order.url or self.url_for(order.controller)
            progress = Progress(lambda line: sys.stderr.write(f"engine {name}: {line}\n"))
            with progress.part("its ranks capture their layouts and join the fleet"):
                self._have_ranks_join(msgspec.structs.replace(order, name=name, url=url))
        finally:
            self._is_joining.release()
        _log.info("engine %s has joined the fleet of %s", name, order.controller)
        return name

    @abstractmethod
    def _have_ranks_join(self, order: JoinOrder) -> None:
        """Order every rank to leave its previous fleet and join a new one. Block until all ranks have joined.

        Args:
            order: order that contains the name and the address of the engine.

        Raises:
            ConfigError: this host does not have the checkpoint, or the order is not valid for this server.
            PeerUnreachable: a rank failed.
            PeerTimeout: a rank did not answer in time.
        """

    @abstractmethod
    def _end_server(self) -> None:
        """End the server and all its processes."""

    def name_for(self, controller: str) -> str:
        """Return the engine's name: the host and the port at which the controller reaches this server.

        A restarted server has the same name.

        Raises:
            ConfigError, PeerUnreachable: see the constructor.
        """
        return join_host_port(self._host(controller), self.port)

    def url_for(self, controller: str) -> str:
        """Return the URL at which the controller and all ranks reach this server; raises as the constructor does."""
        return url_of(self._host(controller), self.port)

    def _host(self, controller: str) -> str:
        """Return the host at which the controller and all ranks reach this server.

        Raises:
            ConfigError: the host is a loopback address, but the controller or a rank is on another host.
            PeerUnreachable: this host has no address from which it reaches the controller.
        """
        host = self._listens_on
        if is_wildcard(host):
            host = own_address(controller)
        if is_loopback(host) and (self._spans_hosts or not is_this_host(controller)):
            who = "a rank" if self._spans_hosts else controller
            raise ConfigError(
                f"--host must be an address that other hosts can reach, got {host!r}: {who} is on another host"
            )
        return host
