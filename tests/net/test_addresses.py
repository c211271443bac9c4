"""Addresses that are bound, parsed, printed and announced."""

from __future__ import annotations

import errno
import os
import socket
import threading
from pathlib import Path

import aiohttp
import pytest

from windlass.engines.embedded.spec import EngineSettings
from windlass.envs import temporary_values
from windlass.errors import ConfigError, PeerUnreachable, TransferFailed
from windlass.net.addresses import (
    HOST_VARIABLE,
    address_towards,
    free_port,
    is_loopback,
    is_this_host,
    is_wildcard,
    join_host_port,
    listen,
    own_address,
    published_host,
    split_host_port,
    url_of,
)
from windlass.net.clock import Deadline
from windlass.net.server import ControlServer
from windlass.transports.inbound import end_connections, listening_ports
from windlass.transports.liveness import INCARNATION_NBYTES, LivenessListener, PeerLiveness
from windlass.transports.peers import PeerEndpoint


def cut_accepted_on(port: int, seconds: float) -> int:
    deadline = Deadline.after(seconds, "test")
    return end_connections(lambda own: own.getsockname()[1] == port, deadline)


@pytest.mark.parametrize("host", ["10.1.2.3", "::1", "fd77:0::2", "node-7.cluster.example"])
def test_a_printed_address_is_parsed_to_the_same_address(host: str) -> None:
    assert split_host_port(join_host_port(host, 15432)) == (host, 15432)
    assert url_of(host, 80).startswith("http://[" if ":" in host else f"http://{host}")


@pytest.mark.parametrize(
    "address",
    ["", ":1", "host", "host:", "host:0", "host:65536", "host:-1", "::1:80", "[::1]", "[host]:1"],
)
def test_an_invalid_address_is_refused_with_its_value(address: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        split_host_port(address)


def test_loopback_and_wildcard_addresses_are_recognised() -> None:
    assert [h for h in ("127.0.0.1", "127.8.8.8", "::1", "localhost", "10.0.0.1") if is_loopback(h)] == ["127.0.0.1", "127.8.8.8", "::1", "localhost"]  # fmt: skip
    assert [h for h in ("", "0.0.0.0", "::", "10.0.0.1", "host") if is_wildcard(h)] == ["", "0.0.0.0", "::"]  # fmt: skip


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_the_bound_address_is_the_published_one_and_answers(host: str) -> None:
    server = ControlServer(host=host, port=0, token="t")
    await server.start()
    try:
        assert server.url.startswith(f"http://{'[::1]' if host == '::1' else host}:")
        async with aiohttp.ClientSession() as http, http.get(server.url) as response:
            assert response.status == 401
    finally:
        await server.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
async def test_binding_every_address_requires_an_advertised_host(host: str) -> None:
    with pytest.raises(ConfigError, match="advertise_host"):
        ControlServer(host=host, port=0, token="t")
    server = ControlServer(host=host, port=0, token="t", advertise_host="::1")
    assert server.url == "http://[::1]:0"
    with pytest.raises(ConfigError, match="advertise_host"):
        published_host("10.0.0.1", "0.0.0.0", "worker")
    assert EngineSettings(name="a", model="m").advertise_host == ""


def test_a_free_port_is_not_one_that_the_kernel_gives_to_other_sockets() -> None:
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [free_port() for _ in range(20)]
    assert len(set(ports)) > 10
    for port in ports:
        assert port < ephemeral
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))


def test_the_address_of_another_host_cannot_be_bound() -> None:
    with pytest.raises(ConfigError, match=r"198\.51\.100\.77"):
        listen("198.51.100.77", 0, "worker")
    with pytest.raises(ConfigError, match="cannot be resolved"):
        listen("no.such.host.invalid", 0, "worker")


def test_the_own_address_is_on_the_route_to_the_controller() -> None:
    assert own_address() == "127.0.0.1"
    assert own_address("http://127.0.0.1:80") == "127.0.0.1"
    assert own_address("http://[::1]:80") == "::1"
    with pytest.raises(PeerUnreachable, match=HOST_VARIABLE):
        address_towards("http://no.such.host.invalid:80")


def test_the_own_address_can_be_set_to_an_address_or_a_network() -> None:
    with temporary_values({HOST_VARIABLE: "127.0.0.9"}):
        assert own_address("http://[::1]:80") == "127.0.0.9"
    with temporary_values({HOST_VARIABLE: "127.0.0.0/8"}):
        assert own_address("http://[::1]:80") == "127.0.0.1"
    for wrong in ("0.0.0.0", "198.51.100.77", "198.51.100.0/24", "nonsense/8"):
        with (
            temporary_values({HOST_VARIABLE: wrong}),
            pytest.raises(ConfigError, match=HOST_VARIABLE),
        ):
            own_address("http://127.0.0.1:80")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_liveness_listener_is_reached_at_its_printed_address(host: str) -> None:
    name = "n" * INCARNATION_NBYTES
    listener = LivenessListener(host, name, "nixl")
    try:
        endpoint = PeerEndpoint("nixl", join_host_port(host, listener.port), name)
        liveness = PeerLiveness(endpoint, Deadline.after(5.0, "test"))
        assert not liveness.has_ended()
        liveness.close()
    finally:
        listener.close()


def test_a_liveness_listener_refuses_to_listen_on_every_address() -> None:
    with pytest.raises(ConfigError, match="one address"):
        LivenessListener("0.0.0.0", "n" * INCARNATION_NBYTES, "nixl")


def test_a_rendezvous_listens_only_on_its_address() -> None:
    from windlass.backends.collective_group import Rendezvous

    rendezvous = Rendezvous("127.0.0.1", 10.0)
    socket.create_connection(("127.0.0.1", rendezvous.port), 5.0).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", rendezvous.port), 5.0)


def test_looking_for_listeners_leaves_no_descriptor_open() -> None:
    before = os.listdir("/proc/self/fd")
    for _ in range(5):
        listening_ports()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_inbound_connections_are_cut_after_their_reader_closes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
        assert port in listening_ports()
        with socket.create_connection(("127.0.0.1", port), 5.0) as client:
            accepted, _ = listener.accept()

            def read() -> None:
                while accepted.recv(64):
                    pass
                accepted.close()

            reader = threading.Thread(target=read)
            reader.start()
            assert cut_accepted_on(port, 20.0) == 1
            reader.join(20.0)
            client.settimeout(20.0)
            assert client.recv(1) == b""
        assert cut_accepted_on(port, 20.0) == 0


def test_a_connection_that_is_still_read_after_the_deadline_is_a_named_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
        with socket.create_connection(("127.0.0.1", port), 5.0):
            accepted, _ = listener.accept()
            with accepted, pytest.raises(TransferFailed, match="but 1 of 1 are open"):
                cut_accepted_on(port, 0.05)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "localhost", "[::1]"])
def test_every_address_of_this_host_is_this_host(host: str) -> None:
    """Debian and Ubuntu give the host's own name the address 127.0.1.1 in /etc/hosts."""
    assert is_this_host(f"http://{host}:8000")


def test_addresses_of_other_hosts_are_not_this_host() -> None:
    # RFC 5737 reserves this network for documentation.
    assert not is_this_host("http://192.0.2.7:8000")
    with pytest.raises(PeerUnreachable, match="cannot be resolved"):
        is_this_host("http://no.such.host.invalid:80")


def test_a_listener_outlives_a_client_that_it_could_not_accept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A moment with too many open files must not keep later peers out."""
    name, accept, failures = "n" * INCARNATION_NBYTES, socket.socket.accept, [errno.EMFILE]

    def scarce(listener: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise OSError(failures[0], os.strerror(failures.pop()))
        return accept(listener)

    listener = LivenessListener("127.0.0.1", name, "nixl")
    try:
        endpoint = PeerEndpoint("nixl", f"127.0.0.1:{listener.port}", name)
        # The listener already waits in the real `accept`.
        PeerLiveness(endpoint, Deadline.after(20.0, "first")).close()
        monkeypatch.setattr(socket.socket, "accept", scarce)
        for _ in range(2):
            PeerLiveness(endpoint, Deadline.after(20.0, "later")).close()
        assert not failures
    finally:
        listener.close()
