"""Writes within one host with `process_vm_writev`: the kernel copies into another process.

This is cross memory attach (CMA). A write returns once its bytes are in the peer's memory. It is
one-sided: it completes even if the target's process is stopped. The kernel only checks that pages
are mapped, so pieces are checked against the published regions first. Before the first write, a
peer must prove that it is the process behind its endpoint (`processes.py`).
"""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from typing import ClassVar, final

from windlass.errors import ConfigError
from windlass.net.clock import Deadline
from windlass.transports.base import OneSidedTransport, WriteBatch
from windlass.transports.process_memory import copy_process_memory, error_of, probe, writev
from windlass.transports.processes import OwnProcess, PeerProcesses, check_alive, let_peers_write
from windlass.transports.region_transport import RegionTransport
from windlass.transports.registry import TransportConfig
from windlass.transports.traits import CEILING_BYTES_PER_S, TransportTraits, WireReport


class CmaConfig(TransportConfig, frozen=True, tag="cma"):
    """Configuration of writes into another process of this host with `process_vm_writev`.

    Attributes:
        num_threads: threads that share the copying of one batch, >= 1.
    """

    remedy: ClassVar[str] = "allow ptrace between processes of this user, or use --transport shm"

    num_threads: int = 2

    def create(self, *, towards: str = "", gpu: int = -1) -> OneSidedTransport:  # noqa: ARG002
        """Start the transport."""
        return CmaTransport(self.num_threads)


@final
class CmaTransport(RegionTransport):
    """`OneSidedTransport` over `process_vm_writev`.

    Raises:
        ConfigError: `num_threads` < 1.
        TransportUnavailable: the kernel or a seccomp filter refuses the call.
    """

    traits = TransportTraits(
        same_host=True,
        one_sided=True,
        ceiling_bytes_per_s=CEILING_BYTES_PER_S["process_vm_writev"],
        unpinned=True,
    )

    def __init__(self, num_threads: int = 1) -> None:
        if num_threads < 1:
            raise ConfigError(f"cma: num_threads must be >= 1, got {num_threads}")
        self._num_threads = num_threads
        self.helpers: Executor = ThreadPoolExecutor(max(num_threads - 1, 1), "windlass-cma")
        """Threads that share the copying of a batch with the calling thread."""
        probe(writev, "cma")
        let_peers_write()
        self._own, self._peers = OwnProcess("cma"), PeerProcesses()
        super().__init__(self._own.endpoint)

    def report(self) -> WireReport:
        """Return the wire of this transport: `process_vm_writev`."""
        return WireReport("cma", "process_vm_writev", f"pid {self._endpoint.address}")

    def close(self) -> None:
        """Forget all regions, and end the copy threads."""
        self._own.close()
        super().close()
        self.helpers.shutdown(wait=True)

    def _write(self, batch: WriteBatch, deadline: Deadline) -> None:
        """Copy all ranges into the peer's memory. Before and after the copy, check that the peer is alive."""
        pid = self._peers.check(batch.endpoint)
        pieces = batch.local_addresses, batch.remote_addresses, batch.nbytes
        try:
            copy_process_memory(writev, pid, pieces, deadline, self.helpers, self._num_threads)
        except OSError as error:
            check_alive(batch.endpoint)
            raise error_of(error, batch.endpoint, "write to") from error
        check_alive(batch.endpoint)
