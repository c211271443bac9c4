"""Conformance tests of `OneSidedTransport`. Define a subclass in a test module.

    class TestCma(TransportConformance):
        config = CmaConfig()

The peer is a child process; override `start_peer` for a transport that works only inside one process. The tests call
`check` instead of `assert`, because pytest does not rewrite `assert` in an installed package.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import ClassVar, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from windlass.errors import (
    PeerUnreachable,
    RegionError,
    TransferError,
    TransferFailed,
    TransferOutcomeUnknown,
)
from windlass.layout.columns import UInt8Array, UInt64Array
from windlass.testing.peer_process import PeerProcess, digest_of
from windlass.transfer.arena import Arena
from windlass.transports.base import OneSidedTransport, WriteBatch
from windlass.transports.peers import PeerEndpoint, RemoteRegion
from windlass.transports.registry import TransportConfig, create_transport

NBYTES = 8 << 20
"""Size of the arenas on both sides."""
GUARD = 0xEE
DEADLINE_S = 10.0
PROMPT_S = 6.0
"""Maximum seconds until a write raises an error, if the error does not depend on a deadline."""


def check(fact: bool, what: str) -> None:
    """Fail the test with the message `what` unless `fact` is True."""
    if not fact:
        raise AssertionError(what)


class Peer(Protocol):
    """Process to which a test writes; for methods see `PeerProcess`."""

    @property
    def region(self) -> RemoteRegion: ...
    def read(self, offset: int, nbytes: int) -> bytes: ...
    def digest(self) -> str: ...
    def fill(self, value: int) -> None: ...
    def unregister(self) -> None: ...
    def register(self) -> None: ...
    def fence(self) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


class Rig:
    """Transport under test, a local arena with distinct 64-bit words, and a peer with an arena of the same size."""

    def __init__(self, transport: OneSidedTransport, arena: Arena, peer: Peer) -> None:
        self.transport = transport
        self.arena = arena
        self.peer = peer
        self.deadline_s = DEADLINE_S
        self.prompt_s = PROMPT_S
        self._placed: list[UInt8Array] = []

    def place(self, content: UInt8Array) -> int:
        """Return the address of `content`, in memory that the transport can register. The rig keeps `content` alive."""
        self._placed.append(content)
        return int(content.ctypes.data)

    def batch(
        self,
        local: npt.ArrayLike,
        remote: npt.ArrayLike,
        nbytes: npt.ArrayLike,
        *,
        endpoint: PeerEndpoint | None = None,
        regions: tuple[RemoteRegion, ...] | None = None,
    ) -> WriteBatch:
        """Return a batch of writes. `local` and `remote` are offsets in the local arena and in the peer's arena."""
        region = self.peer.region
        return WriteBatch(
            endpoint=region.endpoint if endpoint is None else endpoint,
            local_addresses=np.uint64(self.arena.address) + np.asarray(local, np.uint64),
            remote_addresses=np.uint64(region.address) + np.asarray(remote, np.uint64),
            nbytes=np.asarray(nbytes, np.uint64),
            regions=(region,) if regions is None else regions,
        )

    def write(self, batch: WriteBatch, deadline_s: float | None = None) -> None:
        """Write a batch; the default deadline is `self.deadline_s`."""
        self.transport.write(
            batch, deadline_s=self.deadline_s if deadline_s is None else deadline_s
        )

    def write_until(self, batch: WriteBatch, at_s: float) -> None:
        """Repeat a write until the time `at_s` (`time.monotonic`), so that an event at the peer occurs during a write."""
        while time.monotonic() < at_s:
            self.write(batch)

    def expected(self, local: UInt64Array, remote: UInt64Array, nbytes: UInt64Array) -> UInt8Array:
        """Return the expected bytes of the peer's arena: the written pieces, and `GUARD` everywhere else."""
        image = np.full(NBYTES, GUARD, np.uint8)
        for source, target, size in zip(
            local.tolist(), remote.tolist(), nbytes.tolist(), strict=True
        ):
            image[target : target + size] = self.arena.bytes[source : source + size]
        return image

    def check_peer(self, image: UInt8Array, what: str) -> None:
        """Check that every byte of the peer's arena equals `image`."""
        if self.peer.digest() == digest_of(image.data):
            return
        there = np.frombuffer(self.peer.read(0, NBYTES), np.uint8)
        wrong = np.flatnonzero(there != image)
        raise AssertionError(
            f"{what}: {len(wrong)} bytes of the peer's arena are wrong, the first at offset {int(wrong[0])}"
        )

    def check_untouched(self, what: str) -> None:
        """Check that every byte of the peer's arena is `GUARD`."""
        self.check_peer(np.full(NBYTES, GUARD, np.uint8), what)

    def refused(
        self,
        batch: WriteBatch,
        error: type[TransferError] | tuple[type[TransferError], ...],
        within_s: float | None = None,
        deadline_s: float | None = None,
    ) -> str:
        """Check that the write raises `error` within `within_s` (default `self.prompt_s`); return the message."""
        limit_s = self.prompt_s if within_s is None else within_s
        start = time.monotonic()
        with pytest.raises(error) as caught:
            self.write(batch, deadline_s)
        seconds = time.monotonic() - start
        check(seconds < limit_s, f"the error must come within {limit_s} s, took {seconds:.1f} s")
        check("\n" not in str(caught.value), f"the error must be one line, got {caught.value!s}")
        return str(caught.value)


def scattered(
    num_pieces: int, max_nbytes: int, seed: int
) -> tuple[UInt64Array, UInt64Array, UInt64Array]:
    """Return local offsets, remote offsets and sizes of disjoint random pieces of 1 to `max_nbytes` bytes."""
    rng = np.random.default_rng(seed)
    slot = NBYTES // num_pieces
    nbytes = rng.integers(1, min(max_nbytes, slot - 2) + 1, num_pieces).astype(np.uint64)
    jitter = rng.integers(0, np.maximum(slot - nbytes.astype(np.int64), 1), (2, num_pieces))
    local = rng.permutation(num_pieces) * slot + jitter[0]
    remote = rng.permutation(num_pieces) * slot + jitter[1]
    return local.astype(np.uint64), remote.astype(np.uint64), nbytes


class TransportConformance:
    """Base class of conformance tests.

    Attributes:
        config: transport under test; a subclass must set this.
        deadline_s: deadline of writes; increase this for a slow machine.
        prompt_s: maximum seconds until an error; increase this for a slow machine.
    """

    config: ClassVar[TransportConfig]
    deadline_s: ClassVar[float] = DEADLINE_S
    prompt_s: ClassVar[float] = PROMPT_S

    def start_transport(self) -> OneSidedTransport:
        """Return the transport under test."""
        return create_transport(self.config)

    def start_peer(self, transport: OneSidedTransport) -> Peer:  # noqa: ARG002 - for overrides
        """Return a peer that `transport` can reach."""
        return PeerProcess(self.config, NBYTES)

    @pytest.fixture(scope="class")
    @classmethod
    def shared_rig(cls) -> Iterator[Rig]:
        """Yield one rig for all tests that leave its transport and peer working."""
        rig = _make_rig(cls())
        yield rig
        _close_rig(rig)

    @pytest.fixture
    def rig(self, shared_rig: Rig) -> Rig:
        """Return the shared rig, after filling the peer's arena with `GUARD`."""
        shared_rig.peer.fill(GUARD)
        return shared_rig

    @pytest.fixture
    def mortal(self) -> Iterator[Rig]:
        """Yield a new rig for one test, which may kill the peer."""
        rig = _make_rig(self)
        yield rig
        _close_rig(rig)

    def test_every_byte_of_a_random_scatter_arrives_and_nothing_else_changes(
        self, rig: Rig
    ) -> None:
        for seed in range(3):
            pieces = scattered(700, 9000, seed)
            rig.peer.fill(GUARD)
            rig.write(rig.batch(*pieces))
            rig.check_peer(rig.expected(*pieces), f"seed {seed}")

    def test_pieces_of_one_byte_arrive(self, rig: Rig) -> None:
        local, remote, nbytes = scattered(300, 1, 7)
        rig.write(rig.batch(local, remote, nbytes))
        rig.check_peer(rig.expected(local, remote, nbytes), "pieces of one byte")

    @pytest.mark.parametrize("num_pieces", [1024, 1025, 2049, 5000])
    def test_more_pieces_than_one_native_call_takes(self, rig: Rig, num_pieces: int) -> None:
        pieces = scattered(num_pieces, 300, num_pieces)
        rig.write(rig.batch(*pieces))
        rig.check_peer(rig.expected(*pieces), f"{num_pieces} pieces")
        rig.peer.fill(GUARD)
        rig.write(rig.batch(*pieces))  # the first write must not have closed the connection
        rig.check_peer(rig.expected(*pieces), f"{num_pieces} pieces, again")

    def test_pieces_that_follow_each_other_on_both_sides_arrive(self, rig: Rig) -> None:
        nbytes = np.full(2048, NBYTES // 2048, np.uint64)
        offset = np.cumsum(nbytes) - nbytes
        rig.write(rig.batch(offset, offset, nbytes))
        rig.check_peer(rig.arena.bytes, "the whole arena")

    def test_pieces_that_follow_each_other_on_one_side_only_arrive(self, rig: Rig) -> None:
        nbytes = np.full(512, 1000, np.uint64)
        local = np.cumsum(nbytes) - nbytes
        remote = local * np.uint64(2)
        rig.write(rig.batch(local, remote, nbytes))
        rig.check_peer(rig.expected(local, remote, nbytes), "packed to strided")

    def test_a_second_write_replaces_the_first(self, rig: Rig) -> None:
        rig.write(rig.batch([0], [64], [4096]))
        rig.write(rig.batch([8192], [64], [4096]))
        image = np.full(NBYTES, GUARD, np.uint8)
        image[64 : 64 + 4096] = rig.arena.bytes[8192 : 8192 + 4096]
        rig.check_peer(image, "the second write")

    def test_an_empty_batch_is_no_write(self, rig: Rig) -> None:
        rig.write(rig.batch([], [], []))
        rig.check_untouched("an empty batch")

    def test_two_threads_may_write_at_once(self, rig: Rig) -> None:
        local, remote, nbytes = scattered(2000, 3000, 11)
        errors: list[BaseException] = []

        def half(which: slice) -> None:
            try:
                for _ in range(3):
                    rig.write(rig.batch(local[which], remote[which], nbytes[which]))
            except TransferError as error:
                errors.append(error)

        threads = [
            threading.Thread(target=half, args=(which,))
            for which in (slice(0, 1000), slice(1000, None))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        check(not errors, f"threads failed: {errors}")
        rig.check_peer(rig.expected(local, remote, nbytes), "two threads")

    @pytest.mark.parametrize("offset", [-1, NBYTES - 15, NBYTES, 1 << 40])
    @pytest.mark.parametrize("side", ["source", "target"])
    def test_a_piece_outside_registered_or_published_memory_is_refused(
        self, rig: Rig, side: str, offset: int
    ) -> None:
        batch = rig.batch([0, 64], [0, 64], [16, 16])
        if side == "source":
            batch.local_addresses[1] = rig.arena.address + offset
        else:
            batch.remote_addresses[1] = rig.peer.region.address + offset
        rig.refused(batch, RegionError)
        rig.check_untouched("the good piece of a batch with a bad one")

    def test_a_piece_that_wraps_around_the_address_space_is_refused(self, rig: Rig) -> None:
        batch = rig.batch([0], [64], [16])
        batch.nbytes[0] = np.uint64(2**64 - 8)
        rig.refused(batch, RegionError)
        rig.check_untouched("a wrapping piece")

    def test_invalid_batches_are_refused(self, rig: Rig) -> None:
        replace, region = msgspec.structs.replace, rig.peer.region
        half = NBYTES // 2
        halves = (
            replace(region, nbytes=half),
            replace(region, address=region.address + half, nbytes=half),
        )
        successor = replace(region, endpoint=replace(region.endpoint, incarnation="another"))
        other = replace(region.endpoint, transport="another")
        batches = {
            "a piece of zero length": rig.batch([0, 64], [0, 64], [16, 0]),
            "a piece across two adjacent regions": rig.batch([0], [half - 8], [16], regions=halves),
            "no published regions": rig.batch([0], [0], [16], regions=()),
            "columns of different lengths": rig.batch([0, 8], [0], [8, 8]),
            "a region of another endpoint": rig.batch([0], [0], [16], regions=(successor,)),
            "an endpoint of another transport": rig.batch(
                [0], [0], [16], endpoint=other, regions=(replace(region, endpoint=other),)
            ),
        }
        for what, batch in batches.items():
            rig.refused(batch, RegionError)
            rig.check_untouched(what)

    @pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1:1", "999999999", "-1", "0"])
    def test_a_wrong_address_is_unreachable(self, rig: Rig, address: str) -> None:
        endpoint = msgspec.structs.replace(rig.peer.region.endpoint, address=address)
        region = msgspec.structs.replace(rig.peer.region, endpoint=endpoint)
        batch = rig.batch([0], [0], [16], endpoint=endpoint, regions=(region,))
        rig.refused(batch, PeerUnreachable)
        rig.write(rig.batch([0], [0], [16]))  # the right address still works

    def test_an_earlier_process_at_the_same_address_is_unreachable(self, rig: Rig) -> None:
        endpoint = self.predecessor(rig.peer.region.endpoint)
        region = msgspec.structs.replace(rig.peer.region, endpoint=endpoint)
        batch = rig.batch([0], [0], [16], endpoint=endpoint, regions=(region,))
        rig.refused(batch, PeerUnreachable)
        rig.check_untouched("a write meant for an earlier process")

    def predecessor(self, endpoint: PeerEndpoint) -> PeerEndpoint:
        """Return the endpoint of an earlier process at the same address: only the incarnation differs."""
        return msgspec.structs.replace(endpoint, incarnation=f"1{endpoint.incarnation}"[:-1])

    @pytest.mark.parametrize(("start", "nbytes"), [(0, NBYTES), (64, 64), (-64, 128)])
    def test_an_overlapping_registration_is_refused(
        self, rig: Rig, start: int, nbytes: int
    ) -> None:
        with pytest.raises(RegionError, match="overlap"):
            rig.transport.register(rig.arena.address + start, nbytes)
        rig.write(rig.batch([0], [0], [16]))  # the first registration is still valid

    @pytest.mark.parametrize(("address", "nbytes"), [(4096, 0), (4096, -1), (0, 16)])
    def test_a_registration_of_nothing_is_refused(
        self, rig: Rig, address: int, nbytes: int
    ) -> None:
        with pytest.raises(RegionError):
            rig.transport.register(address, nbytes)

    def test_a_region_can_be_unregistered_once_and_registered_again(self, rig: Rig) -> None:
        address = rig.place(np.full(4096, 3, np.uint8))
        region = rig.transport.register(address, 4096)
        rig.transport.unregister(region)
        with pytest.raises(RegionError):
            rig.transport.unregister(region)
        batch = rig.batch([0], [0], [16])
        batch.local_addresses[0] = address
        rig.refused(batch, RegionError)
        region = rig.transport.register(address, 4096)
        rig.write(batch)
        rig.transport.unregister(region)
        check(
            rig.peer.read(0, 16) == bytes([3] * 16),
            "a write must accept a source that was registered again",
        )

    def test_ranges_registered_together_are_sources_and_go_one_by_one(self, rig: Rig) -> None:
        base = rig.place(np.repeat(np.arange(1, 5, dtype=np.uint8), 4096))
        starts = [base + 4096 * index for index in range(4)]
        regions = rig.transport.register_all([(start, 4000) for start in starts])
        check(
            [r.address for r in regions] == starts,
            f"register_all must return regions in the order of its argument, got {regions}",
        )
        rig.transport.unregister(regions[1])
        for index in (0, 2, 3):
            batch = rig.batch([0], [64 * index], [16])
            batch.local_addresses[0] = starts[index]
            rig.write(batch)
            check(
                rig.peer.read(64 * index, 16) == bytes([index + 1] * 16),
                f"bytes of range {index} did not arrive",
            )
        for address in (starts[1], starts[2] + 3999):
            batch = rig.batch([0], [0], [16])
            batch.local_addresses[0] = address
            rig.refused(batch, RegionError)
        rig.transport.register_all([])
        for region in (regions[3], regions[0], regions[2]):
            rig.transport.unregister(region)

    @pytest.mark.parametrize("bad", [(0, 16), (64, 0), (2048, 64), (4000, 200)])
    def test_one_range_that_is_refused_registers_none(self, rig: Rig, bad: tuple[int, int]) -> None:
        """Check ranges that are at address 0, are empty, occur twice, or overlap another range."""
        base = rig.place(np.full(16384, 7, np.uint8))
        start = base + bad[0] if bad[0] else 0
        good = [(base, 32), (base + 2048, 64), (base + 4096, 4096)]
        with pytest.raises(RegionError):
            rig.transport.register_all([*good, (start, bad[1])])
        for address, _ in good:
            batch = rig.batch([0], [0], [16])
            batch.local_addresses[0] = address
            rig.refused(batch, RegionError)
        rig.check_untouched("ranges that were refused")
        for region in rig.transport.register_all(good):
            rig.transport.unregister(region)

    def test_a_peer_can_unregister_and_register_again(self, rig: Rig) -> None:
        rig.peer.unregister()
        rig.peer.register()
        rig.write(rig.batch([0], [0], [16]))
        check(
            rig.peer.read(0, 16) == rig.arena.bytes[:16].tobytes(),
            "bytes must arrive after the peer has registered its memory again",
        )

    def test_memory_registered_after_a_fence_at_either_end_is_written(self, rig: Rig) -> None:
        """Check registration after a fence, because an engine may register its shadow copy again after a fence."""
        rig.write(rig.batch([0], [0], [16]))

        def fence() -> None:
            rig.transport.fence(deadline_s=rig.deadline_s)

        for number, end in enumerate((rig.peer.fence, fence, rig.peer.fence)):
            end()
            rig.peer.unregister()
            rig.peer.register()
            start = 4096 * (number + 1)
            rig.write(rig.batch([start], [0], [16]))
            image = rig.arena.bytes[start : start + 16].tobytes()
            check(rig.peer.read(0, 16) == image, f"bytes must arrive after fence {number}")

    def test_a_deadline_that_has_passed_is_an_error(self, rig: Rig) -> None:
        rig.refused(rig.batch([0], [0], [16]), TransferError, deadline_s=0.0)

    def test_the_report_names_the_transport(self, rig: Rig) -> None:
        report = rig.transport.report()
        name = rig.transport.endpoint().transport
        check(report.transport == name, f"the report must name transport {name!r}, got {report}")
        check(
            bool(report.protocol) and bool(report.detail),
            f"protocol and detail of the report must not be empty, got {report}",
        )

    def test_a_dead_peer_is_unreachable_before_and_after_contact(self, mortal: Rig) -> None:
        batch = mortal.batch([0], [0], [4096])
        mortal.write(batch)
        mortal.peer.kill()
        for _ in range(2):
            mortal.refused(batch, PeerUnreachable)
        successor = self.start_peer(mortal.transport)
        with closing(successor):
            rig = Rig(mortal.transport, mortal.arena, successor)
            rig.write(rig.batch([0], [0], [4096]))
            check(
                successor.read(0, 4096) == mortal.arena.bytes[:4096].tobytes(),
                "bytes must arrive at the new peer",
            )

    def test_close_is_idempotent_and_ends_the_right_to_write(self, mortal: Rig) -> None:
        batch = mortal.batch([0], [0], [16])
        mortal.arena.close()
        mortal.transport.close()
        mortal.transport.close()
        mortal.refused(batch, TransferError)


class ProcessConformance(TransportConformance):
    """Additional conformance tests, for transports between processes."""

    def process(self, rig: Rig) -> PeerProcess:
        """Return the peer of `rig`, which must be a `PeerProcess`.

        Raises:
            TypeError: the peer is not a `PeerProcess`.
        """
        if not isinstance(rig.peer, PeerProcess):
            raise TypeError(f"peer must be a PeerProcess, got {type(rig.peer).__name__}")
        return rig.peer

    def test_a_peer_killed_during_a_write_is_unreachable(self, mortal: Rig) -> None:
        pieces = scattered(3000, 2500, 5)
        batch = mortal.batch(*pieces)
        self.process(mortal).signal_on_write(int(pieces[1][0]), signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises((PeerUnreachable, TransferOutcomeUnknown)) as caught:
            mortal.write_until(batch, start + self.deadline_s)
        check(
            time.monotonic() < start + self.deadline_s,
            f"the error must come within {self.deadline_s} s, came later: {caught.value}",
        )
        mortal.refused(batch, PeerUnreachable)

    def test_a_stopped_peer_is_an_error_in_time_unless_the_wire_is_one_sided(
        self, mortal: Rig
    ) -> None:
        batch = mortal.batch([0], [0], [NBYTES])
        mortal.write(mortal.batch([64], [0], [8]))
        self.process(mortal).stop()
        if mortal.transport.traits.one_sided:
            mortal.write(batch)
        else:
            mortal.refused(
                batch,
                (PeerUnreachable, TransferFailed, TransferOutcomeUnknown),
                within_s=1.0 + self.prompt_s,
                deadline_s=1.0,
            )
        self.process(mortal).resume()
        mortal.peer.read(0, 1)  # wait until the peer runs again
        at_s = time.monotonic() + self.deadline_s
        while True:  # repeat until the outcome of the interrupted write is known
            try:
                mortal.write(batch)
                break
            except TransferOutcomeUnknown:
                check(
                    time.monotonic() < at_s, "the outcome of the interrupted write is still unknown"
                )
        mortal.check_peer(mortal.arena.bytes, "after the peer was resumed")


def _make_rig(suite: TransportConformance) -> Rig:
    transport = suite.start_transport()
    arena = Arena(transport, NBYTES)
    arena.bytes.view(np.uint64)[:] = np.arange(NBYTES // 8, dtype=np.uint64) * 2654435761
    rig = Rig(transport, arena, suite.start_peer(transport))
    rig.deadline_s, rig.prompt_s = suite.deadline_s, suite.prompt_s
    return rig


def _close_rig(rig: Rig) -> None:
    rig.peer.close()
    if rig.arena.nbytes:
        rig.arena.close()
    rig.transport.close()
