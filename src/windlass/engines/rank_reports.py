"""Orders to the ranks of an engine's server to join a fleet, and the reports of the ranks.

The server's own answer is not enough: SGLang answers for the first stage of a pipeline, when later stages may not
have begun, and vLLM for the first of its replicas. So each rank writes its report into a folder of the launcher and
sends a notice through a socket in that folder. The folder also contains the secrets that a rank needs. Only this
user can read it: no secret is in an environment variable or in a request.

A rank on another host sends its report to the engine's server, which writes it into the folder
(`windlass.engines.report_route`). The rank has the token from its own host and proves that by a code over the
report: no secret travels from host to host.
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
from windlass.engines.spec import AgentSettings, CapturedLayout, EngineServer, RankStep
from windlass.envs import control_token, environment_value
from windlass.errors import (
    ConfigError,
    PeerTimeout,
    PeerUnreachable,
    UnsupportedLayout,
    WindlassError,
)
from windlass.layout.naming.patterns import said
from windlass.progress import Progress

_log = logging.getLogger(__name__)
_SOCKET = "sent"
_SECRETS = "secrets"
REPORT_PATH = "/windlass/report"
OTHER_NODES_VARIABLE = "WINDLASS_RANKS_ON_OTHER_NODES"
"""Set for ranks on other hosts than their server's."""
HEAD_HEADER = "x-windlass-report"
PROOF_HEADER = "x-windlass-proof"
REPORTED_S = 2.0
"""Seconds to wait for reports that ranks have sent already."""
_PREFIX = "windlass-reports-"


class RefusedByOtherRank(UnsupportedLayout):
    """Another rank of this engine could not capture its layout; that rank says why."""


class Secrets(msgspec.Struct, frozen=True):
    """Secrets that open the controller and the engine's own server to a rank.

    Attributes:
        token: token of the controller; empty if there is none.
        key, api_key, admin_api_key: see `windlass.engines.http.EngineHttp`.
    """

    token: str = ""
    key: str = ""
    api_key: str = ""
    admin_api_key: str = ""

    def server(self, url: str) -> EngineHttp:
        """Return the rank's own server with these keys."""
        return EngineHttp(url, self.key, self.api_key, self.admin_api_key)

    def __repr__(self) -> str:
        return "Secrets(...)"


class ReportHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A report without its body. It travels ahead of the body, so that the server can refuse the body unread.

    Attributes:
        folder: path of the folder, on the server's host, where the launcher waits for the report.
        rank: index of the rank that reports.
        failed: whether the rank could not carry out its order; the body is then the reason, in UTF-8.
        nbytes: length of the body.
        digest: SHA-256 of the body, in hex.
    """

    folder: str
    rank: int
    failed: bool
    nbytes: int
    digest: str

    def proof(self, token: str) -> str:
        """Return a proof that the sender of this head knows `token`; the proof does not reveal the token."""
        return hmac.new(token.encode(), msgspec.json.encode(self), hashlib.sha256).hexdigest()


class Notice(msgspec.Struct, frozen=True):
    """Sent through the folder's socket once the report of `rank` is complete."""

    rank: int
    failed: bool


class Report(NamedTuple):
    """Result of one rank, on its way to the launcher that waits for it.

    Attributes:
        folder, rank, failed: see `ReportHead`.
        body: the result, or the reason for the failure.
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
        """Return the HTTP headers under which the body is sent to `REPORT_PATH`."""
        head = self.head()
        return {
            HEAD_HEADER: base64.b64encode(msgspec.json.encode(head)),
            PROOF_HEADER: head.proof(token).encode(),
        }

    def leave(self) -> None:
        """Write the report into its folder and notify the launcher, a process of this user on this host.

        Raises:
            OSError: the launcher no longer waits for it.
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
    """Carry out an order in a rank, and report the result of `order` or the reason for its failure.

    This function raises nothing, because an exception would end SGLang's loop, and it does not wait for a
    launcher that has stopped listening. The launcher waits for the report in `folder`, a folder of the host on
    which the engine's server runs. A rank of another host sends its report to that server by HTTP (`server_url`), and
    its only secret is the token of its environment (`control_token`).
    """
    token = ""
    if not environment_value(OTHER_NODES_VARIABLE):
        server_url = ""
    try:
        secrets = Secrets(token := control_token()) if server_url else _secrets_in(folder)
        report = Report(folder, rank, failed=False, body=order(secrets))
    except RefusedByOtherRank:
        # The rank that has a reason reports it.
        return
    except Exception as error:  # noqa: BLE001 - the engine's loop, and the engine, would end with it
        _log.exception("rank %s", rank)
        report = Report(folder, rank, failed=True, body=reason_of(error).encode())
    try:
        if server_url:
            EngineHttp(server_url).send(REPORT_PATH, report.body, report.headers(token))
        else:
            report.leave()
    # The launcher has given up or ended.
    except (OSError, WindlassError) as error:
        _log.warning("rank %s: nobody hears what it reports in %s: %s", rank, folder, error)


@contextmanager
def _socket_of(folder: Path) -> Iterator[str]:
    """Yield a path of at most 107 bytes, the limit for sockets, to the socket of a folder at any depth."""
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{opened}/{_SOCKET}"
    finally:
        os.close(opened)


def is_waited_for(report: ReportHead) -> bool:
    """Return whether a process of this user waits for the report in the folder that it names."""
    folder = Path(report.folder)
    try:
        require_own(folder)
    except (ConfigError, OSError, ValueError):  # no path may contain a NUL
        return False
    is_ours = folder.name.startswith(_PREFIX) and folder.parent == Path(tempfile.gettempdir())
    return is_ours and (folder / _SOCKET).is_socket()


def reason_of(error: Exception) -> str:
    """Return the text that a rank reports for an error; an engine's own error needs its type to be understood."""
    return str(error) if isinstance(error, WindlassError) else f"{type(error).__name__}: {error}"


def _secrets_in(folder: str) -> Secrets:
    try:
        return msgspec.json.decode((Path(folder) / _SECRETS).read_bytes(), type=Secrets)
    except OSError as error:
        raise ConfigError(
            f"every rank must be on its launcher's host and of its user, got no {folder}: {error}"
        ) from error


@final
class RankReports(ExitStack):
    """A folder for the reports of `world_size` ranks, and for the secrets that they need; left when they were read."""

    def __init__(self, world_size: int, secrets: Secrets = Secrets()) -> None:  # noqa: B008 - frozen
        super().__init__()
        self._world_size = world_size
        with ExitStack() as undo:  # the secrets are not left lying there if this fails
            undo.push(self)
            self.folder = self.enter_context(tempfile.TemporaryDirectory(prefix=_PREFIX))
            (Path(self.folder) / _SECRETS).write_bytes(msgspec.json.encode(secrets))
            self._listening = self.enter_context(socket.socket(socket.AF_UNIX))
            with _socket_of(Path(self.folder)) as path:
                self._listening.bind(path)
            self._listening.listen(world_size)
            undo.pop_all()

    def gather(self, deadline_s: float) -> list[bytes]:
        """Return what every rank reported, by rank.

        Raises:
            PeerTimeout: names the ranks that reported nothing within `deadline_s`.
            PeerUnreachable: a rank could not carry out the order; its reason.
        """
        missing, end_s = set(range(self._world_size)), time.monotonic() + deadline_s
        while missing:
            try:
                sent = self._next(end_s)
            except TimeoutError as error:
                raise PeerTimeout(
                    f"ranks {sorted(missing)} have not reported within {deadline_s} s that an order is "
                    f"carried out; every rank must be of this server"
                ) from error
            if sent.failed:
                reason = (Path(self.folder) / str(sent.rank)).read_text()
                raise PeerUnreachable(f"rank {sent.rank}: {reason}")
            missing.discard(sent.rank)
        return [(Path(self.folder) / str(rank)).read_bytes() for rank in range(self._world_size)]

    def _next(self, end_s: float) -> Notice:
        self._listening.settimeout(max(end_s - time.monotonic(), 0.001))
        line, _ = self._listening.accept()
        with line, line.makefile("rb") as sent:
            line.settimeout(max(end_s - time.monotonic(), 0.001))
            return msgspec.json.decode(sent.read(), type=Notice)


def join_fleet(server: EngineServer, settings: AgentSettings, secrets: Secrets) -> None:
    """Have the ranks of a running server join a fleet, after leaving the one before.

    None joins before the layouts of all have been found good: an engine is never in a fleet unchecked,
    wherever this process ends.

    Raises:
        ConfigError: a checkpoint tensor is in the memory of no rank; and see `EngineServer.order`.
        PeerUnreachable: a rank refused, and says why; and see `EngineServer.order`. PeerTimeout.
    """
    progress = Progress(lambda line: sys.stderr.write(f"engine {settings.name}: {line}\n"))
    with progress.part("its ranks capture their layout", settings.join_deadline_s):
        captured = _order(server, RankStep.CAPTURE, settings, secrets)
    ranks = [msgspec.json.decode(each, type=CapturedLayout) for each in captured]
    check_layouts(settings.name, ranks)
    with progress.part("its ranks join the fleet", settings.join_deadline_s):
        _order(server, RankStep.JOIN, settings, secrets)


def _order(
    server: EngineServer, step: RankStep, settings: AgentSettings, secrets: Secrets
) -> list[bytes]:
    """Return what every rank has reported of this step, by rank."""
    with RankReports(settings.world_size, secrets) as reports:
        try:
            server.order(secrets.server(settings.url), step, settings, reports.folder)
        except PeerUnreachable as error:
            # A server may end with the rank that failed, and its answer tells nothing of why.
            try:
                reports.gather(REPORTED_S)
            except PeerTimeout:
                raise error from None
            except PeerUnreachable as reason:
                raise reason from None
            raise
        return reports.gather(REPORTED_S if server.answers_for_all else settings.join_deadline_s)


def check_layouts(engine: str, ranks: Sequence[CapturedLayout]) -> None:
    """Raise if a loader reads a checkpoint tensor that no rank's memory contains.

    Such a tensor is in memory that capture cannot see (a kernel's private copy), and updates would silently
    miss it. stderr reports the tensors that all ranks' loaders skip, which the engine does not serve. It also
    reports the cost of updates through buffers, if any, and the seconds of each capture stage on the slowest
    rank.

    Raises:
        ConfigError: names the tensors that no rank contains.
    """
    nowhere = set(ranks[0].unplaced).intersection(*(rank.unplaced for rank in ranks[1:]))
    unread = nowhere.intersection(*(rank.unread for rank in ranks))
    if hidden := nowhere - unread:
        raise ConfigError(
            f"engine {engine}: checkpoint tensors that its loader reads must be found in the memory of a "
            f"rank, got none of {said(hidden)}: a kernel may keep a copy of its own (on a CPU with AVX512-BF16 "
            "or AMX try `--dtype float32`)"
        )
    if unread:
        sys.stderr.write(
            f"engine {engine}: its loader passes by {said(unread)} of the checkpoint, and updates do too\n"
        )
    if nbytes := max(rank.buffer_nbytes for rank in ranks):
        sys.stderr.write(
            f"engine {engine}: buffers of {nbytes} bytes stay on a rank; "
            f"{max(len(rank.recomputed) for rank in ranks)} of its tensors are filled by the engine's own "
            f"loader after every update\n"
        )
    slowest = max((rank.seconds for rank in ranks), key=lambda seconds: seconds.get("all", 0.0))
    if slowest:
        stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in slowest.items())
        sys.stderr.write(f"engine {engine}: seconds of its capture: {stages}\n")
