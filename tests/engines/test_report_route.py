"""A rank on another host reports to the launcher; no other process can report for this rank."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from asgi import request
from http_answers import answering_requests

from windlass import envs
from windlass.engines.private_routes import Message
from windlass.engines.rank_reports import (
    HEAD_HEADER,
    OTHER_NODES_VARIABLE,
    PROOF_HEADER,
    REPORT_PATH,
    RankReports,
    Report,
    Secrets,
    carry_out,
)
from windlass.engines.report_route import MAX_BODY_NBYTES, ReportRoute
from windlass.envs import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from windlass.errors import ConfigError, PeerUnreachable
from windlass.net.access import Access, role_token

SECRET = "secret of the test"
ENGINE = role_token(SECRET, Access.ENGINE)
DEADLINE_S = 20.0


async def engine(_scope: Message, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


def headers_of(report: Report, token: str) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value) for name, value in report.headers(token).items()]


async def tell(
    body: bytes,
    headers: Sequence[tuple[bytes, bytes]] = (),
    *,
    server: str = SECRET,
    method: str = "POST",
    path: str = REPORT_PATH,
    root_path: str = "",
) -> tuple[int, Any]:
    route = ReportRoute(engine, server)
    return await request(route, method, path, body, headers, root_path=root_path)


@pytest.mark.parametrize("token", [SECRET, ENGINE])
def test_reports_of_remote_ranks_are_gathered(
    token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(token)
    monkeypatch.setattr(envs, "removed_secrets", {})
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(file))
    given: list[Secrets] = []
    passed: list[bytes] = []

    def take(_path: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        passed.extend([body, *(value for _, value in encoded)])
        status, answer = asyncio.run(tell(body, encoded))
        return status, msgspec.json.encode(answer)

    def do(secrets: Secrets) -> bytes:
        given.append(secrets)
        return b"layout"

    def fail(_secrets: Secrets) -> bytes:
        raise ConfigError("its weights are packed")

    with answering_requests(take) as url, RankReports(2, Secrets("owner's", "key")) as reports:
        carry_out(reports.folder, 0, do, server_url=url)
        monkeypatch.setenv(OTHER_NODES_VARIABLE, "1")
        carry_out(reports.folder, 1, do, server_url=url)
        assert reports.gather(DEADLINE_S) == [b"layout", b"layout"]
        assert given == [Secrets("owner's", "key"), Secrets(token)]
        carry_out(reports.folder, 1, fail, server_url=url)
        with pytest.raises(PeerUnreachable, match="rank 1: its weights are packed"):
            reports.gather(DEADLINE_S)
    assert not any(
        secret in body for body in passed for secret in (SECRET.encode(), ENGINE.encode())
    )


async def test_a_changed_or_unsigned_report_is_refused() -> None:
    """Check also that the launcher stops waiting for the rank."""
    with RankReports(1) as reports:
        report = Report(reports.folder, 0, failed=False, body=b"layout")

        async def refuse(told: Report, token: str, server: str = SECRET) -> None:
            head, proof = headers_of(told, token)[0], headers_of(report, token)[1]
            assert (await tell(told.body, [head, proof], server=server))[0] == 403
            with pytest.raises(PeerUnreachable, match="rank 0: the rank must have the token"):
                reports.gather(DEADLINE_S)

        for token in ("", "another", role_token(SECRET, Access.TRAINER)):
            await refuse(report, token)
        await refuse(report._replace(body=b"another"), SECRET)
        await refuse(report._replace(failed=True), SECRET)
        await refuse(report, SECRET, server=ENGINE)
        await refuse(report, "", server="")


async def test_the_body_of_a_stranger_is_never_read() -> None:
    """Regression: the server read 64 MiB of a stranger, in quadratic time, before it looked for a proof."""

    async def receive() -> Message:
        raise AssertionError("the body was read")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    with RankReports(1) as reports:
        report = Report(reports.folder, 0, failed=False, body=b"x" * 1000)
        for headers in ((), headers_of(report, "another"), headers_of(report, SECRET)[:1]):
            scope = {"type": "http", "method": "POST", "path": REPORT_PATH, "headers": headers}
            await ReportRoute(engine, SECRET)(scope, receive, send)
    assert [m["status"] for m in sent if "status" in m] == [400, 403, 400]


def test_a_report_to_a_folder_without_a_waiting_launcher_is_refused(tmp_path: Path) -> None:
    with RankReports(1) as reports:
        gone = reports.folder
    (elsewhere := tmp_path / Path(gone).name).mkdir(0o700)
    with RankReports(1) as open_to_all, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(elsewhere / "sent"))
        Path(open_to_all.folder).chmod(0o755)
        refuse_all([gone, str(tmp_path), str(elsewhere), open_to_all.folder, "\0"])
    elsewhere.joinpath("sent").unlink()
    elsewhere.rmdir()
    assert list(tmp_path.iterdir()) == []


def refuse_all(folders: Sequence[str]) -> None:
    for folder in folders:
        report = Report(folder, 3, failed=False, body=b"")
        status, answer = asyncio.run(tell(b"", headers_of(report, SECRET)))
        assert (status, answer) == (410, {"error": "rank 3: no process waits for its report"})


def head_of(text: bytes) -> tuple[bytes, bytes]:
    return HEAD_HEADER.encode(), base64.b64encode(text)


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (
            (HEAD_HEADER.encode(), b"no base64"),
            "x-windlass-report must contain the head of a report",
        ),
        (head_of(b"not JSON at all"), "x-windlass-report must contain the head of a report"),
        (head_of(b'{"folder": "", "rank": "../x", "failed": false}'), "Expected `int`"),
        ((b"x-other", b""), "must be given once each"),
    ],
)
async def test_a_malformed_report_is_refused(head: tuple[bytes, bytes], says: str) -> None:
    status, answer = await tell(b"", [head, (PROOF_HEADER.encode(), b"")])
    assert (status, says in answer["error"]) == (400, True), answer


async def test_the_body_of_a_report_must_match_its_signed_head() -> None:
    with RankReports(1) as reports:
        report = Report(reports.folder, 0, failed=False, body=b"the layout")
        for body in (b"the layouT", b"the", b"the layout and more"):
            assert (await tell(body, headers_of(report, SECRET)))[0] == 400
        head = msgspec.structs.replace(report.head(), nbytes=MAX_BODY_NBYTES + 1)
        proof = (PROOF_HEADER.encode(), head.proof(SECRET).encode())
        headers = [head_of(msgspec.json.encode(head)), proof]
        assert (await tell(b"", headers))[0] == 413


@pytest.mark.parametrize("root_path", ["", "/v1", "/api/model"])
async def test_requests_to_other_routes_reach_the_engine(root_path: str) -> None:
    """Check servers without and with a root path; a server also answers this route under its root path."""
    assert await tell(b"{}", path="/generate", root_path=root_path) == (204, {})
    assert await tell(b"{}", method="GET", root_path=root_path) == (204, {})
    assert (await tell(b"{}", path=root_path + REPORT_PATH, root_path=root_path))[0] == 400
