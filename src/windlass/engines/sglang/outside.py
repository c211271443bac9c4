"""Agent of an SGLang server without Windlass. It runs in a process of its own, on any host that reaches the server.

The agent pauses and resumes the server by SGLang's routes. Trainers write with Mooncake straight into the server's
parameters. After each write the agent reads the parameters back, one-sided, and compares digests with the trainers'.
The agent watches the server: if the server ends, trainers stop writing, and a restarted server is connected again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import final
from urllib.parse import urlsplit

import msgspec
import numpy as np

from windlass.config import PauseMode
from windlass.control.engine_channel import report_cannot_join
from windlass.engines.client import EngineClient, EngineWeights
from windlass.engines.http import EngineHttp
from windlass.engines.sglang.table import (
    LayoutFile,
    WeightTable,
    match,
    read_model,
    read_table,
    require_captured,
)
from windlass.errors import ConfigError, PeerTimeout, PeerUnreachable, RegionError, WindlassError
from windlass.layout.manifest import ShardManifest
from windlass.memory.place import memory_on
from windlass.net.clock import Backoff
from windlass.net.sockets import keep_alive
from windlass.transfer.arena import Arena, aligned_offsets
from windlass.transports.base import WriteBatch
from windlass.transports.mooncake.transport import MooncakeConfig
from windlass.transports.mooncake.window import MooncakeWindow
from windlass.transports.registry import parse_transport

_log = logging.getLogger(__name__)
READ_DEADLINE_S = 120.0
"""Maximum seconds to read a rank's parameters."""
WATCH_DEADLINE_S = 10.0
"""Maximum seconds to open the connection by which the agent notices the end of the server."""
MIXED = "windlass-update"
"""Weight version that a server reports during an update.

An agent that reads this version when it connects does not know whether an earlier agent left weights of two versions.
So the server stays paused until an update has written all weights.
"""
_DEFAULT = "default"
"""Weight version of an SGLang server before the first update."""


class Attach(msgspec.Struct, frozen=True, kw_only=True):
    """Order to connect a running server to a controller.

    Attributes:
        url: address of the server.
        transport: `mooncake`, or its configuration as JSON. With `gpu`, copies for verification are on that GPU.
        api_key, admin_api_key: see `EngineHttp`.
        return_deadline_s: seconds that the agent waits for a server that has ended or does not answer yet.
    """

    name: str
    url: str
    controller: str
    token: str
    transport: str = "mooncake"
    api_key: str = ""
    admin_api_key: str = ""
    return_deadline_s: float = 600.0

    def __repr__(self) -> str:
        return f"Attach({self.name!r}, {self.url!r}, {self.controller!r})"


def attach(order: Attach, layout: LayoutFile) -> int:
    """Connect a server to the controller, and carry out the controller's commands until this process ends.

    If the server was restarted, connect it again. This function never returns; it ends with an exception.

    Raises:
        ConfigError, UnsupportedLayout: the layout does not describe the server; see `require_captured` and `match`.
        AuthenticationError, ProtocolError: the controller refused the token or a rank.
        PeerUnreachable, PeerTimeout: the controller does not answer, or the server has not answered for
            `return_deadline_s`.
    """
    server = EngineHttp(order.url, "", order.api_key, order.admin_api_key)
    try:
        while True:
            tables = _wait_for_tables(server, layout, order.return_deadline_s)
            with _joined(order, layout, server, tables):
                found = {"name": order.name, "url": order.url, "ranks": len(tables)}
                os.write(1, msgspec.json.encode(found) + b"\n")
                _wait_for_change(server, tables)
            sys.stderr.write(f"engine {order.name}: the server has ended or was restarted\n")
    except WindlassError as error:
        with contextlib.suppress(WindlassError):
            reason = f"{type(error).__name__}: {error}"
            report_cannot_join(order.controller, order.token, order.name, reason)
        raise


def _wait_for_tables(
    server: EngineHttp, layout: LayoutFile, deadline_s: float
) -> tuple[WeightTable, ...]:
    """Wait until the server publishes the weight tables of all ranks, and return the tables by rank.

    Raises:
        ConfigError, UnsupportedLayout: the layout does not describe the server.
        PeerUnreachable, PeerTimeout: the server publishes no tables within `deadline_s`.
    """
    end_s, pauses = time.monotonic() + deadline_s, Backoff(0.1, 2.0).pauses()
    while True:
        try:
            return _read_checked_tables(server, layout)
        except (PeerUnreachable, PeerTimeout):
            if time.monotonic() > end_s:
                raise
            threading.Event().wait(next(pauses))


def _read_checked_tables(server: EngineHttp, layout: LayoutFile) -> tuple[WeightTable, ...]:
    """Check that the layout describes the server, and return the server's weight tables by rank.

    Raises as `require_captured`, `read_table` and `match` do.
    """
    require_captured(server, layout)
    tables = _read_tables(server, len(layout.ranks))
    for rank, (captured, table) in enumerate(zip(layout.ranks, tables, strict=True)):
        match(rank, captured.parameters, table)
    return tables


def _read_tables(server: EngineHttp, world_size: int) -> tuple[WeightTable, ...]:
    """Return the weight tables of all ranks; raises as `read_table` does."""
    return tuple(read_table(server, rank) for rank in range(world_size))


@contextlib.contextmanager
def _joined(
    order: Attach, layout: LayoutFile, server: EngineHttp, tables: tuple[WeightTable, ...]
) -> Iterator[None]:
    """Join the controller's fleet with one agent per rank of the server. At the end of the `with` block, leave the fleet.

    Raises:
        ConfigError: the transport is not Mooncake.
        WindlassError: a rank's weights cannot be read, or the controller refused a rank.
    """
    config = parse_transport(order.transport)
    if not isinstance(config, MooncakeConfig):
        raise ConfigError(
            f"--transport must be mooncake, got {order.transport}: SGLang registers its weights with Mooncake"
        )
    is_whole = read_model(server).weight_version != MIXED
    if not is_whole:
        sys.stderr.write(
            f"engine {order.name}: an earlier update may have left weights of two versions; the server stays paused "
            "until the next version\n"
        )
    with ExitStack() as joined:
        for rank, (captured, table) in enumerate(zip(layout.ranks, tables, strict=True)):
            manifest = replace(
                ShardManifest.decode(captured.manifest), worker=f"{order.name}/{rank}"
            )
            window = MooncakeWindow(
                config.placed(towards=order.controller, gpu=-1),
                table.session,
                [(entry.address, entry.nbytes) for entry in table.entries.values()],
            )
            # `EngineClient` closes the window too if it cannot join. A second call of `close` does nothing.
            joined.callback(window.close)
            memory = OutsideMemory(window, manifest, table)
            joined.callback(memory.close)
            memory.fetch()
            client = EngineClient(
                EngineWeights(
                    manifest=manifest,
                    addresses=memory.copies,
                    regions=(memory.arena.region,),
                    remote=memory,
                    mixed_weights=not is_whole,
                ),
                transport=window,
                hooks=OutsideHooks(server, rank, table),
                controller=order.controller,
                token=order.token,
                world_size=len(tables),
                url=order.url if rank == 0 else "",
                can_send=False,
                serves_own_weights=is_whole,
            )
            joined.callback(client.leave)
        yield


def _wait_for_change(server: EngineHttp, tables: tuple[WeightTable, ...]) -> None:
    """Wait until the server has ended, or publishes tables that differ from `tables`.

    Keep an idle connection to the server open: the kernel of the server's host closes the connection when the server's
    process ends. The server or a proxy may also close the connection earlier. So after each close, read the server's tables,
    and wait again if the server still publishes `tables`.
    """
    target, pauses = urlsplit(server.url), Backoff(0.05, 5.0).pauses()
    port = target.port or (443 if target.scheme == "https" else 80)
    while True:
        with contextlib.suppress(OSError):
            line = socket.create_connection((target.hostname, port), timeout=WATCH_DEADLINE_S)
            with line:
                line.settimeout(None)
                keep_alive(line)
                line.recv(1)
        try:
            if _read_tables(server, len(tables)) != tables:
                return
        except WindlassError:
            return
        threading.Event().wait(next(pauses))


@final
class OutsideMemory:
    """`RemoteMemory` of one rank of the server, and copies of the rank's parameters in this process.

    Attributes:
        arena: memory of the copies.
        copies: addresses of the copies, in manifest order.
    """

    def __init__(self, window: MooncakeWindow, manifest: ShardManifest, table: WeightTable) -> None:
        sizes = [parameter.nbytes for parameter in manifest.parameters]
        offsets, total = aligned_offsets(sizes)
        self.arena = Arena(window, total, memory_on(window.traits.gpu))
        self.copies = tuple(self.arena.address + offset for offset in offsets)
        self.endpoint, self.regions = window.owner, window.remote
        self.addresses = tuple(table.entries[p.name].address for p in manifest.parameters)
        self._window = window
        self._batch = WriteBatch(
            endpoint=window.owner,
            local_addresses=np.array(self.copies, np.uint64),
            remote_addresses=np.array(self.addresses, np.uint64),
            nbytes=np.array(sizes, np.uint64),
            regions=window.remote,
        )

    def fetch(self) -> None:
        """Read the live parameters of the server's rank into the copies, and wait until all bytes have arrived."""
        self._window.read(self._batch, deadline_s=READ_DEADLINE_S)

    def close(self) -> None:
        """Free the copies. Do not raise if the window was closed before."""
        with contextlib.suppress(RegionError):
            self.arena.close()


@final
class OutsideHooks:
    """`EngineHooks` of one rank, over the server's routes. Rank 0 pauses and resumes the server for all ranks."""

    def __init__(self, server: EngineHttp, rank: int, table: WeightTable) -> None:
        self._server, self._rank, self._table = server, rank, table
        self._before = self._label = ""

    def pause(self, pause_id: str, mode: PauseMode, deadline_s: float) -> None:  # noqa: ARG002
        """Check that the server was not restarted. On rank 0, pause it, flush its caches, and set its version to `MIXED`.

        SGLang accepts a flush only if no step runs and no result is outstanding. So no step reads weights after the flush.

        Raises:
            ConfigError: the mode is `in_place`. SGLang would keep the KV cache, which the old weights computed.
            PeerUnreachable: the server did not flush its caches within `deadline_s`, or it was restarted and its weights
                have other addresses. Nothing was written.
            PeerTimeout: the server did not answer a request in time. Nothing was written.
        """
        if read_table(self._server, self._rank) != self._table:
            raise PeerUnreachable(
                f"{self._server.url}: rank {self._rank} must publish the same table as at its join, got another table: the "
                "server was restarted"
            )
        if self._rank:
            return
        if mode is PauseMode.IN_PLACE:
            raise ConfigError(
                f"pause_mode must be abort or retract for a server without Windlass, got {mode}: the server would keep a KV "
                "cache that the old weights computed"
            )
        end_s = time.monotonic() + deadline_s
        label = read_model(self._server).weight_version or _DEFAULT
        self._before = self._before or label
        self._server.post("/pause_generation", {"mode": str(mode)}, deadline_s)
        self._flush(end_s)
        self._set_label(MIXED, end_s - time.monotonic())

    def _flush(self, end_s: float) -> None:
        """Flush the server's caches. Repeat a failed request until the monotonic time `end_s`.

        Raises:
            PeerUnreachable: no request succeeded by `end_s`.
            PeerTimeout: the server did not answer a request in time.
        """
        for pause_s in Backoff(0.005, 0.5).pauses():
            try:
                self._server.post("/flush_cache", {}, max(end_s - time.monotonic(), 0.1))
            # SGLang refuses a flush while results of the last step are outstanding.
            except PeerUnreachable:
                if time.monotonic() + pause_s > end_s:
                    raise
                threading.Event().wait(pause_s)
            else:
                return

    def resume(self, deadline_s: float) -> None:
        """On rank 0, resume the server if `pause` has paused it. Do nothing on other ranks.

        If the update has set no version, first restore the weight version that the server had before the pause.

        Raises:
            PeerUnreachable, PeerTimeout: the server did not answer a request with success, or not in time.
        """
        if self._rank or not self._before:
            return
        if self._label == MIXED:
            self._set_label(self._before, deadline_s)
        self._server.post("/continue_generation", {}, deadline_s)
        self._before = ""

    def finalise(self) -> None:
        """Do nothing. A layout with computed tensors was refused before, and `pause` has emptied the server's caches."""

    def set_version(self, version: int, deadline_s: float) -> None:
        """On rank 0, set the version that the server reports. Do nothing on other ranks.

        Raises:
            PeerUnreachable, PeerTimeout: the server did not set the version.
        """
        if self._rank == 0:
            self._set_label(str(version), deadline_s)

    def _set_label(self, label: str, deadline_s: float) -> None:
        """Set the weight version that the server reports, without aborting requests."""
        body: Mapping[str, object] = {"new_version": label, "abort_all_requests": False}
        self._server.post("/update_weight_version", body, deadline_s)
        self._label = label
