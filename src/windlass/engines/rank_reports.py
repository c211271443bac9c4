"""Orders to the ranks of an SGLang server to join a fleet, and the reports of the ranks.

The response of SGLang's schedulers does not cover all ranks: they respond after the first pipeline stage. So each rank
writes a report into a folder that the server's HTTP process creates, and then sends a notice to that process through a
Unix socket in that folder. The folder also contains the secrets that a rank needs, and only this user can read it. No
secret is in an environment variable or in an order.

A rank on another host sends its report to the engine's server by HTTP, and the server writes the report into the
folder (`windlass.engines.report_route`). The rank reads the token on its own host, and proves by an HMAC of the report
that it has the token. No secret is sent from host to host.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, final

import msgspec

from windlass.engines.http import EngineHttp
from windlass.engines.private_routes import require_own
from windlass.engines.spec import AgentSettings, CapturedLayout, RankStep
from windlass.envs import control_token, environment_value
from windlass.errors import (
    ConfigError,
    PeerTimeout,
    PeerUnreachable,
    UnsupportedLayout,
    WindlassError,
)
from windlass.layout.naming.patterns import said

_log = logging.getLogger(__name__)
_SOCKET = "sent"
_SECRETS = "secrets"
REPORT_PATH = "/windlass/report"
OTHER_NODES_VARIABLE = "WINDLASS_RANKS_ON_OTHER_NODES"
"""Environment variable that the launcher sets for ranks that run on another host than their server."""
HEAD_HEADER = "x-windlass-report"
PROOF_HEADER = "x-windlass-proof"
REPORTED_S = 2.0
"""Seconds to wait for reports that the ranks have probably sent already."""
_PREFIX = "windlass-reports-"


class RefusedByOtherRank(UnsupportedLayout):
    """Another rank of this engine could not capture its layout, and reports the reason."""


class Secrets(msgspec.Struct, frozen=True):
    """Secrets with which a rank authenticates to the controller and to the engine's own server.

    Attributes:
        token: token of the controller; empty without a controller.
        key, api_key, admin_api_key: see `windlass.engines.http.EngineHttp`.
    """

    token: str = ""
    key: str = ""
    api_key: str = ""
    admin_api_key: str = ""

    def server(self, url: str) -> EngineHttp:
        """Return the engine's server at `url`, with these keys."""
        return EngineHttp(url, self.key, self.api_key, self.admin_api_key)

    def __repr__(self) -> str:
        return "Secrets(...)"


class ReportHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of a report's body. The rank sends this head in an HTTP header, so that the server may skip the body.

    Attributes:
        folder: path of the folder, on the server's host, where the HTTP process waits for the report.
        rank: index of the rank that reports.
        failed: whether the rank failed to carry out its order. If so, the body is the reason, in UTF-8.
        nbytes: number of bytes of the body.
        digest: SHA-256 of the body, in hex.
    """

    folder: str
    rank: int
    failed: bool
    nbytes: int
    digest: str

    def proof(self, token: str) -> str:
        """Return an HMAC of this head. It proves that the sender knows `token`, and does not reveal the token."""
        return hmac.new(token.encode(), msgspec.json.encode(self), hashlib.sha256).hexdigest()


class Notice(msgspec.Struct, frozen=True):
    """Message that a rank sends to the HTTP process's socket after the rank has written its report."""

    rank: int
    failed: bool


class Report(NamedTuple):
    """Report of one rank to the server's HTTP process about an order.

    Attributes:
        folder, rank, failed: see `ReportHead`.
        body: result of the order; the reason in UTF-8 if the rank failed.
    """

    folder: str
    rank: int
    failed: bool
    body: bytes

    def head(self) -> ReportHead:
        """Return the head of this report."""
        digest = hashlib.sha256(self.body).hexdigest()
        return ReportHead(self.folder, self.rank, self.failed, len(self.body), digest)

    def headers(self, token: str) -> dict[str, bytes]:
        """Return the HTTP headers for a request to `REPORT_PATH` with this report's body."""
        head = self.head()
        return {
            HEAD_HEADER: base64.b64encode(msgspec.json.encode(head)),
            PROOF_HEADER: head.proof(token).encode(),
        }

    def leave(self) -> None:
        """Write the report into `folder`, and notify the server's HTTP process through a Unix socket.

        The HTTP process must run on this host, as this user.

        Raises:
            OSError: the HTTP process no longer waits for the report.
        """
        folder = Path(self.folder)
        (folder / str(self.rank)).write_bytes(self.body)
        with socket.socket(socket.AF_UNIX) as line, _socket_of(folder) as path:
            line.connect(path)
            # The notice fits into the socket's buffer, so the rank does not wait for a reader.
            line.sendall(msgspec.json.encode(Notice(self.rank, self.failed)))


def carry_out(
    folder: str, rank: int, order: Callable[[Secrets], bytes], *, server_url: str = ""
) -> None:
    """Call `order` in a rank, and send a report with the result, or with the reason of a failure, to the HTTP process.

    This function raises nothing, because an exception would end SGLang's main loop.

    Args:
        folder: folder, on the host of the engine's server, where the HTTP process waits for the report.
        rank: index of this rank.
        order: function that carries out the order and returns the body of the report.
        server_url: address of the engine's server. A rank on another host sends its report to this address. Such a rank
            cannot read `folder`, so it passes only one secret to `order`: the token in its own environment
            (`control_token`).
    """
    token = ""
    if not environment_value(OTHER_NODES_VARIABLE):
        server_url = ""
    try:
        secrets = Secrets(token := control_token()) if server_url else _secrets_in(folder)
        report = Report(folder, rank, failed=False, body=order(secrets))
    except RefusedByOtherRank:
        # The other rank reports the reason.
        return
    except Exception as error:  # noqa: BLE001 - an exception would end the engine's main loop
        _log.exception("rank %s", rank)
        report = Report(folder, rank, failed=True, body=reason_of(error).encode())
    try:
        if server_url:
            EngineHttp(server_url).send(REPORT_PATH, report.body, report.headers(token))
        else:
            report.leave()
    # The server has given up or ended.
    except (OSError, WindlassError) as error:
        _log.warning("rank %s: no process waits for the report in %s: %s", rank, folder, error)


@contextmanager
def _socket_of(folder: Path) -> Iterator[str]:
    """Yield a short path to the socket in `folder`: Linux limits the path of a Unix socket to 107 bytes."""
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{opened}/{_SOCKET}"
    finally:
        os.close(opened)


def is_waited_for(report: ReportHead) -> bool:
    """Return whether a process of this user on this host waits for the report in `report.folder`."""
    folder = Path(report.folder)
    try:
        require_own(folder)
    except (ConfigError, OSError, ValueError):  # ValueError: the path contains a NUL
        return False
    is_ours = folder.name.startswith(_PREFIX) and folder.parent == Path(tempfile.gettempdir())
    return is_ours and (folder / _SOCKET).is_socket()


def reason_of(error: Exception) -> str:
    """Return the text that a rank reports for an error: the message, and the type of an error of other code."""
    return str(error) if isinstance(error, WindlassError) else f"{type(error).__name__}: {error}"


def _secrets_in(folder: str) -> Secrets:
    """Return the secrets that the HTTP process has written into the folder of an order.

    Raises:
        ConfigError: this rank cannot read the folder, because it runs on another host or as another user.
    """
    try:
        return msgspec.json.decode((Path(folder) / _SECRETS).read_bytes(), type=Secrets)
    except OSError as error:
        raise ConfigError(
            f"every rank must run on the server's host and as the server's user; this rank cannot read {folder}: {error}"
        ) from error


@final
class RankReports(ExitStack):
    """Temporary folder for the reports of `world_size` ranks, and for the secrets that the ranks need.

    Closing this object deletes the folder.
    """

    def __init__(self, world_size: int, secrets: Secrets = Secrets()) -> None:  # noqa: B008 - frozen
        super().__init__()
        self._world_size = world_size
        # Delete the folder with the secrets if an error occurs in this block.
        with ExitStack() as undo:
            undo.push(self)
            self.folder = self.enter_context(tempfile.TemporaryDirectory(prefix=_PREFIX))
            (Path(self.folder) / _SECRETS).write_bytes(msgspec.json.encode(secrets))
            self._listening = self.enter_context(socket.socket(socket.AF_UNIX))
            with _socket_of(Path(self.folder)) as path:
                self._listening.bind(path)
            self._listening.listen(world_size)
            undo.pop_all()

    def gather(self, deadline_s: float) -> list[bytes]:
        """Wait for the reports of all ranks, and return their bodies, sorted by rank.

        Raises:
            PeerTimeout: a rank has not reported within `deadline_s`; the message names these ranks.
            PeerUnreachable: a rank failed to carry out the order; the message has the rank's reason.
        """
        missing, end_s = set(range(self._world_size)), time.monotonic() + deadline_s
        while missing:
            try:
                sent = self._next(end_s)
            except TimeoutError as error:
                raise PeerTimeout(
                    f"ranks {sorted(missing)} have not reported within {deadline_s} s that they carried out "
                    f"an order; see the server's log for their errors"
                ) from error
            if sent.failed:
                reason = (Path(self.folder) / str(sent.rank)).read_text()
                raise PeerUnreachable(f"rank {sent.rank}: {reason}")
            missing.discard(sent.rank)
        return [(Path(self.folder) / str(rank)).read_bytes() for rank in range(self._world_size)]

    def _next(self, end_s: float) -> Notice:
        """Wait for the next notice of a rank; raise TimeoutError at the monotonic time `end_s`."""
        self._listening.settimeout(max(end_s - time.monotonic(), 0.001))
        line, _ = self._listening.accept()
        with line, line.makefile("rb") as sent:
            line.settimeout(max(end_s - time.monotonic(), 0.001))
            return msgspec.json.decode(sent.read(), type=Notice)


SendStep = Callable[[EngineHttp, RankStep, AgentSettings, str], None]
"""Function that orders every rank of a server to carry out a step and to report in the given folder.

It raises ConfigError if a setting would make updates wrong, PeerUnreachable if the server did not answer or could not
pass the order on, and PeerTimeout.
"""


def join_fleet(send: SendStep, settings: AgentSettings, secrets: Secrets) -> None:
    """Order the ranks of a running server to leave their previous fleet and join a new one.

    All ranks capture their layouts, this process checks the layouts, and then all ranks join.

    Raises:
        ConfigError: updates would not reach a tensor that the engine's loader reads, or a setting would make updates
            wrong.
        PeerUnreachable: a rank failed (the message has the rank's reason), or the server did not pass an order on.
        PeerTimeout: a rank or the server did not answer in time.
    """
    capture_layouts(send, settings, secrets)
    order_step(send, RankStep.JOIN, settings, secrets)


def capture_layouts(send: SendStep, settings: AgentSettings, secrets: Secrets) -> None:
    """Order the ranks to capture their layouts, and check the layouts. Raises as `join_fleet` does."""
    captured = order_step(send, RankStep.CAPTURE, settings, secrets)
    ranks = [msgspec.json.decode(each, type=CapturedLayout) for each in captured]
    check_layouts(settings.name, ranks)


def order_step(
    send: SendStep, step: RankStep, settings: AgentSettings, secrets: Secrets
) -> list[bytes]:
    """Order every rank to carry out one step; return the bodies of their reports, sorted by rank.

    Raises:
        ConfigError: a setting would make updates wrong; nothing was ordered.
        PeerUnreachable: a rank failed (the message has the rank's reason), or the server did not pass the order on.
        PeerTimeout: a rank has not reported within `settings.join_deadline_s`, or the server did not answer.
    """
    with RankReports(settings.world_size, secrets) as reports:
        try:
            send(secrets.server(settings.url), step, settings, reports.folder)
        except PeerUnreachable as error:
            # If the server failed because of a rank, raise the error with that rank's reason instead.
            try:
                reports.gather(REPORTED_S)
            except PeerTimeout:
                raise error from None
            except PeerUnreachable as reason:
                raise reason from None
            raise
        # The server answers after the first pipeline stage, so later stages may not have begun.
        return reports.gather(settings.join_deadline_s)


def check_layouts(engine: str, ranks: Sequence[CapturedLayout]) -> None:
    """Check that updates will reach every checkpoint tensor that the engine's loader reads.

    A loader may read a tensor that no rank's memory contains. The values are then in memory that capture cannot see (such
    as a kernel's private copy), and updates would not change them.

    Print to stderr which tensors the loaders of all ranks skip. Also print the size of the update buffers, the number of
    tensors that the loader recomputes after each update, and the seconds of each capture stage on the slowest rank.

    Raises:
        ConfigError: a loader reads a tensor that no rank's memory contains; the message names these tensors.
    """
    nowhere = set(ranks[0].unplaced).intersection(*(rank.unplaced for rank in ranks[1:]))
    unread = nowhere.intersection(*(rank.unread for rank in ranks))
    if hidden := nowhere - unread:
        raise ConfigError(
            f"engine {engine}: the engine's loader reads {said(hidden)}, but the memory of no rank contains these "
            "tensors, so updates would not change them; a kernel may keep a private copy (on a CPU with AVX512-BF16 "
            "or AMX, try `--dtype float32`)"
        )
    if unread:
        sys.stderr.write(
            f"engine {engine}: its loader skips {said(unread)} of the checkpoint, and updates skip them too\n"
        )
    if nbytes := max(rank.buffer_nbytes for rank in ranks):
        sys.stderr.write(
            f"engine {engine}: updates need buffers of {nbytes} bytes per rank; the engine's own loader computes "
            f"{max(len(rank.recomputed) for rank in ranks)} tensors per rank again after every update\n"
        )
    slowest = max((rank.seconds for rank in ranks), key=lambda seconds: seconds.get("all", 0.0))
    if slowest:
        stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in slowest.items())
        sys.stderr.write(f"engine {engine}: seconds of its capture: {stages}\n")
