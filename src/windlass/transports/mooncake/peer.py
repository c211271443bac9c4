"""One peer of the Mooncake transport: deadlines, identity, and what an error means.

Native calls take no deadline (they give up after 30 to 62 s), so each runs in a thread of
its peer, and we stop waiting when our own deadline passes. From then on the peer takes no call
until that call has returned with success.

Every failure is the one code -1, and it is no fence: bytes may land after it. It is turned
into one of three errors:

- nothing listens at the peer's port any more: the process is gone, and its memory with it. Over
  RDMA, where a call to a dead peer may never return, its liveness listener tells at once.
- the wire is TCP with one connection per peer, and the call came back long before any of the
  engine's own timeouts: the engine's queue to the peer is first-in first-out and each entry
  is acknowledged by the peer before the next is sent, so when a read that is queued behind
  the failed write comes back good, nothing of that write is still on its way.
- anything else: unknown, for good. A timeout means that a connection was given up with bytes
  in it; a read on the connection made after it proves nothing about those.
"""

from __future__ import annotations

import queue
import re
import socket
import threading
import time
from collections.abc import Callable
from typing import final

import numpy as np

from windlass.errors import ConfigError, PeerUnreachable, TransferFailed, TransferOutcomeUnknown
from windlass.layout.columns import UInt8Array, UInt64Array
from windlass.memory.ranges import Pieces
from windlass.net.addresses import join_host_port, split_host_port
from windlass.net.clock import Deadline
from windlass.transports.base import MemoryRegion, PeerEndpoint
from windlass.transports.liveness import INCARNATION_NBYTES, PeerLiveness
from windlass.transports.mooncake.native import Started
from windlass.transports.regions import overlaps

TOKEN_NBYTES = 16
PROMPT_S = 2.0
"""A call that returns within this has met none of the engine's timeouts, which are >= 5 s."""
CONNECT_S = 1.0
IDLE_S = 10.0
READS = 4
_OTHER_PROCESS = 1
_NO_PIECES = np.empty(0, np.uint64)

_INCARNATION = re.compile(r"([0-9a-f]{32})@([0-9a-f]{1,16})(?::([0-9]{1,5}))?")


def format_incarnation(token: bytes, address: int, liveness_port: int) -> str:
    """Name a random token, where its owner keeps it for peers to read, and its liveness port; 0 for none."""
    return f"{token.hex()}@{address:x}" + (f":{liveness_port}" if liveness_port else "")


def liveness_name(token: bytes) -> str:
    """Return the incarnation that the liveness listener of the token's owner sends."""
    return token.hex()[:INCARNATION_NBYTES]


@final
class _Call:
    """A native call on its way through the peer's thread. Guarded by the peer's lock.

    Args:
        run: the call; returns its code.
        local: addresses of the memory that it reads or fills; a peer's page is not named.
        nbytes: sizes of these pieces.
    """

    def __init__(self, run: Callable[[], int], local: UInt64Array, nbytes: UInt64Array) -> None:
        self.run = run
        self.local, self.nbytes = local, nbytes
        self.begun = self.cancelled = False
        self.done = threading.Event()
        """It came back, or the peer's process has ended and it never may."""
        self.code = -1
        self.seconds = 0.0


@final
class MooncakePeer:
    """Calls to one incarnation of one peer, through one engine. Thread-safe.

    Args:
        started: the engine; it must not have talked to an earlier process at this address,
            because it remembers that one's data port for good.
        endpoint: the peer.
        page: registered with the engine, of at least `TOKEN_NBYTES`. Nobody else's: a read that
            comes back after its deadline still writes there.

    Raises:
        PeerUnreachable: the endpoint is not one of a Mooncake transport.
    """

    def __init__(self, started: Started, endpoint: PeerEndpoint, page: UInt8Array) -> None:
        match = _INCARNATION.fullmatch(endpoint.incarnation)
        try:
            self._session = split_host_port(endpoint.address)
        except ConfigError as error:
            raise PeerUnreachable(f"mooncake: {error}") from error
        if match is None:
            raise PeerUnreachable(
                f"mooncake: incarnation must be token@address, got {endpoint.incarnation!r}"
            )
        self.started = started
        self.endpoint = endpoint
        self._token, self._token_address = bytes.fromhex(match[1]), int(match[2], 16)
        self._liveness_port = int(match[3] or 0)
        self._liveness: PeerLiveness | None = None
        self._gone = self._closed = False
        self.page = page
        self._page_address = int(page.ctypes.data)
        self._answered = False
        self._unknown: dict[_Call, str] = {}
        """Nobody waits for them, and bytes may still land; and what is said of each."""
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._open: set[_Call] = set()
        """Not come back."""
        self._thread: threading.Thread | None = None

    @property
    def may_be_forgotten(self) -> bool:
        """Whether nothing is lost with this object: no call is open, no outcome unknown.

        Of a peer that is gone the outcomes do not matter.
        """
        with self._lock:
            return not self._not_over()

    def touches(self, region: MemoryRegion) -> bool:
        """Return whether local memory of the region may be read, or filled, by a call."""
        with self._lock:
            return any(overlaps(region, call.local, call.nbytes) for call in self._not_over())

    def _not_over(self) -> set[_Call]:
        return self._open if self._gone else self._open | self._unknown.keys()

    def confirm(self, deadline: Deadline) -> None:
        """See that the process at the address is the one that is meant, before bytes are sent.

        Raises:
            PeerUnreachable: it is gone, another one, or does not answer.
            TransferOutcomeUnknown: an earlier write to it has an unknown outcome.
        """
        self._refuse_unknown(deadline)
        self._watch_liveness(deadline)
        code = self._ask_token(deadline)
        self._refuse_closed(deadline)
        if code == _OTHER_PROCESS:
            raise PeerUnreachable(
                f"{deadline.purpose}: {self.endpoint.address} is another process than "
                f"{self.endpoint.incarnation}; nothing was sent"
            )
        if code != 0:
            raise PeerUnreachable(
                f"{deadline.purpose}: {self.endpoint.address} is gone or was restarted (code "
                f"{code}); nothing was sent"
            )

    def _ask_token(self, deadline: Deadline) -> int:
        """Return the code of reading the token. A connection that the peer has cut fails twice, and is made anew."""
        code = -1
        for _ in range(READS):
            call = self._start(self._read_token)
            if not call.done.wait(deadline.remaining_s):
                self._cancel(call)  # nothing was written, so whether it was in time does not matter
                self._refuse_unknown(deadline)
                raise PeerUnreachable(
                    f"{deadline.purpose}: {self.endpoint.address} did not answer within "
                    f"{deadline.seconds} s; nothing was sent"
                )
            code = call.code
            if code in {0, _OTHER_PROCESS} or not self._answered or self._gone:
                return code
            if self._refuses_connections(deadline):
                return code
        return code

    def write(self, pieces: Pieces, deadline: Deadline) -> None:
        """Carry out one native call.

        Raises:
            PeerUnreachable: the peer's process is gone.
            TransferFailed: refused by the peer, or not begun by the deadline; it is over.
            TransferOutcomeUnknown: bytes may still land.
        """
        self._refuse_unknown(deadline)
        deadline.check_before_more()
        engine = self.started.engine
        columns = [column.tolist() for column in pieces]
        local, _, nbytes = pieces
        call = self._start(
            lambda: engine.batch_transfer_sync_write(self.endpoint.address, *columns),
            local.copy(),
            nbytes.copy(),
        )
        if not call.done.wait(deadline.remaining_s):
            if self._cancel(call):
                self._refuse_unknown(deadline)
                raise TransferFailed(
                    f"{deadline.purpose}: other writes took the deadline of {deadline.seconds} s; "
                    "nothing more was sent"
                )
            self._give_up(
                call,
                f"{deadline.purpose}: no answer from {self.endpoint.address} within "
                f"{deadline.seconds} s; bytes may still land",
            )
        if call.code != 0:
            self._explain(call, deadline)

    def close(self) -> None:
        """Let the threads end; waits for them unless a native call is stuck.

        Writes that are not over by then end with an error.
        """
        self._closed = True
        if self._liveness is not None:
            self._liveness.close()
        with self._lock:
            thread = self._thread
            stuck = self._gone or bool(self._unknown)
        if thread is None:
            return
        self._calls.put(None)
        if not stuck:
            thread.join(CONNECT_S)
        self._wake()

    def _watch_liveness(self, deadline: Deadline) -> None:
        """Connect to the peer's liveness listener, once, and have a thread wait for its end."""
        with self._lock:
            if self._liveness is not None or not self._liveness_port:
                return
        endpoint = PeerEndpoint(
            "mooncake",
            join_host_port(self._session[0], self._liveness_port),
            liveness_name(self._token),
        )
        liveness = PeerLiveness(endpoint, deadline)
        with self._lock:
            is_first = self._liveness is None
            if is_first:
                self._liveness = liveness
        if not is_first:  # another thread was
            liveness.close()
            return
        threading.Thread(
            target=self._watch, args=(liveness,), name=self._thread_name, daemon=True
        ).start()

    def _watch(self, liveness: PeerLiveness) -> None:
        liveness.watch()
        with self._lock:
            self._gone = not self._closed  # this side's end looks the same
        if self._gone:
            self._wake()
            self._calls.put(None)

    def _wake(self) -> None:
        """Wake whoever waits for a call that may never come back."""
        with self._lock:
            for call in self._open:
                call.done.set()

    def _explain(self, call: _Call, deadline: Deadline) -> None:
        """Make an exception of code -1, as the module's docstring says; nothing else does."""
        if self._closed:
            if self._cancel(call):
                self._refuse_closed(deadline)
            self._give_up(
                call, f"{deadline.purpose}: the transport was closed; bytes may still land"
            )
            return
        if self._gone or self._refuses_connections(deadline):
            raise PeerUnreachable(f"{deadline.purpose}: {self.endpoint.address} is gone")
        if self.started.ordered and call.seconds < PROMPT_S and self._drained(deadline):
            raise TransferFailed(
                f"{deadline.purpose}: {self.endpoint.address} refused a piece (code {call.code}); "
                "is the memory still registered there?"
            )
        self._give_up(
            call,
            f"{deadline.purpose}: code {call.code} from {self.endpoint.address}, which is still "
            "there; bytes may still land",
        )

    def _cancel(self, call: _Call) -> bool:
        """Take a call back; return whether that was in time. Then it touches no memory, however long others are stuck."""
        with self._lock:
            call.cancelled = not call.begun
            if call.cancelled:
                self._open.discard(call)
            return call.cancelled

    def _give_up(self, call: _Call, message: str) -> None:
        """Note that bytes of a call may still land, unless it has come back in this very moment."""
        with self._lock:
            if call.done.is_set() and call.code == 0:
                return
            self._unknown[call] = message
        raise TransferOutcomeUnknown(message)

    def _drained(self, deadline: Deadline) -> bool:
        call = self._start(self._read_token)
        return call.done.wait(deadline.remaining_s) and call.code == 0 and call.seconds < PROMPT_S

    def _refuses_connections(self, deadline: Deadline) -> bool:
        """Return whether the peer's host says that nothing listens there; silence is no answer."""
        try:
            with socket.create_connection(
                self._session, timeout=max(min(CONNECT_S, deadline.remaining_s), 0.01)
            ):
                return False
        except ConnectionRefusedError:
            return True
        except OSError:
            return False

    def _read_token(self) -> int:
        if not self._answered:
            # The first contact of a peer that never answers holds a lock inside the engine for a
            # minute, and other peers' first contacts with it. A probe holds none.
            code = self.started.engine.send_probe(self.endpoint.address)
            if code != 0:
                return code
            self._answered = True
        self.page[:TOKEN_NBYTES] = 0
        code = self.started.engine.transfer_sync_read(
            self.endpoint.address, self._page_address, self._token_address, TOKEN_NBYTES
        )
        if code == 0 and self.page[:TOKEN_NBYTES].tobytes() != self._token:
            return _OTHER_PROCESS
        return code

    def _refuse_unknown(self, deadline: Deadline) -> None:
        self._refuse_closed(deadline)
        with self._lock:
            unknown, gone = next(iter(self._unknown.values()), ""), self._gone
        if gone:
            raise PeerUnreachable(f"{deadline.purpose}: {self.endpoint.address} is gone")
        if not unknown:
            return
        if self._refuses_connections(deadline):
            with self._lock:
                self._gone = True
            raise PeerUnreachable(f"{deadline.purpose}: {self.endpoint.address} is gone")
        raise TransferOutcomeUnknown(f"an earlier write is open: {unknown}")

    def _refuse_closed(self, deadline: Deadline) -> None:
        if self._closed:
            raise TransferFailed(f"{deadline.purpose}: the transport is closed")

    def _start(
        self,
        run: Callable[[], int],
        local: UInt64Array = _NO_PIECES,
        nbytes: UInt64Array = _NO_PIECES,
    ) -> _Call:
        call = _Call(run, local, nbytes)
        with self._lock:
            if self._gone or self._closed:
                call.done.set()
                return call
            self._open.add(call)
            self._calls.put(call)
            if self._thread is None:
                # A daemon: a native call that is stuck must not keep the interpreter from ending.
                self._thread = threading.Thread(
                    target=self._serve, name=self._thread_name, daemon=True
                )
                self._thread.start()
        return call

    @property
    def _thread_name(self) -> str:
        return f"mooncake-{self.endpoint.address}"

    def _serve(self) -> None:
        """Carry calls out, until there has been none for `IDLE_S`: most peers do not say that they end."""
        while True:
            try:
                call = self._calls.get(timeout=IDLE_S)
            except queue.Empty:
                call = None
            if call is None:
                with self._lock:
                    if self._calls.empty():
                        self._thread = None
                        return
                continue
            try:
                self._execute(call)
            finally:  # whoever waits gets code -1 rather than a deadline
                self._end(call)

    def _execute(self, call: _Call) -> None:
        with self._lock:
            call.begun = not call.cancelled
        if call.begun:
            start = time.monotonic()
            call.code = call.run()
            call.seconds = time.monotonic() - start

    def _end(self, call: _Call) -> None:
        with self._lock:
            self._open.discard(call)
            if call.code == 0:  # acknowledged after all; any other code stays unknown
                self._unknown.pop(call, None)
            call.done.set()
