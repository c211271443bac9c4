"""What a rank on another host has to say reaches whoever waits for it, and nobody else says it for that rank."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from asgi import request
from http_answers import answering

from windlass import envs
from windlass.engines.private_routes import Message
from windlass.engines.rank_reports import (
    OTHER_NODES_VARIABLE,
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


async def tell(
    body: bytes, *, server: str = SECRET, method: str = "POST", path: str = REPORT_PATH
) -> tuple[int, Any]:
    return await request(ReportRoute(engine, server), method, path, body)


def encoded(report: Report, token: str) -> bytes:
    return msgspec.json.encode(report.proven_by(token))


@pytest.mark.parametrize("token", [SECRET, ENGINE])
def test_what_ranks_elsewhere_report_is_gathered_with_the_others(
    token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(token)
    monkeypatch.setattr(envs, "_secrets", {})
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(file))
    given: list[Secrets] = []
    passed: list[bytes] = []

    def take(_path: str, body: bytes) -> tuple[int, bytes]:
        passed.append(body)
        status, answer = asyncio.run(tell(body))
        return status, msgspec.json.encode(answer)

    def do(secrets: Secrets) -> bytes:
        given.append(secrets)
        return b"layout"

    def fail(_secrets: Secrets) -> bytes:
        raise ConfigError("its weights are packed")

    with answering(take) as url, RankReports(2, Secrets("owner's", "key")) as reports:
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


async def test_a_report_without_proof_or_that_was_changed_is_refused() -> None:
    """And nobody waits any longer for the rank that has sent it."""

    async def refuse(said: bytes, server: str = SECRET) -> None:
        assert (await tell(said, server=server))[0] == 403
        with pytest.raises(PeerUnreachable, match="rank 0: a rank must have the token"):
            reports.gather(DEADLINE_S)

    with RankReports(1) as reports:
        report = Report(reports.folder, 0, failed=False, body=b"layout")
        proven = msgspec.json.decode(encoded(report, SECRET), type=Report)
        for said in (
            msgspec.json.encode(report),
            *(
                encoded(report, token)
                for token in ("", "another", role_token(SECRET, Access.TRAINER))
            ),
            msgspec.json.encode(msgspec.structs.replace(proven, body=b"another")),
            msgspec.json.encode(msgspec.structs.replace(proven, failed=True)),
            msgspec.json.encode(msgspec.structs.replace(proven, proof="\u00e9")),
        ):
            await refuse(said)
        await refuse(encoded(report, SECRET), server=ENGINE)
        await refuse(encoded(report, ""), server="")


def test_a_report_is_left_nowhere_but_where_it_is_waited_for(tmp_path: Path) -> None:
    with RankReports(1) as reports:
        gone = reports.folder
    (elsewhere := tmp_path / Path(gone).name).mkdir(0o700)
    with RankReports(1) as open_to_all, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(elsewhere / "sent"))
        Path(open_to_all.folder).chmod(0o755)
        refuse_all([gone, str(tmp_path), str(elsewhere), open_to_all.folder])
    elsewhere.joinpath("sent").unlink()
    elsewhere.rmdir()
    assert list(tmp_path.iterdir()) == []


def refuse_all(folders: Sequence[str]) -> None:
    for folder in folders:
        report = Report(folder, 3, failed=False, body=b"")
        status, answer = asyncio.run(tell(encoded(report, SECRET)))
        assert (status, answer) == (410, {"error": "rank 3: nobody waits for its report"})


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"not JSON at all", 400, "body must be a report"),
        (b'{"folder": "", "rank": "../x", "failed": false, "body": ""}', 400, "Expected `int`"),
        (b" " * (MAX_BODY_NBYTES + 1), 413, "body must be at most 67108864 bytes"),
    ],
)
async def test_what_is_no_report_is_refused(body: bytes, status: int, says: str) -> None:
    answered, answer = await tell(body)
    assert (answered, says in answer["error"]) == (status, True), answer


async def test_other_routes_are_the_engines() -> None:
    assert await tell(b"{}", path="/generate") == (204, {})
    assert await tell(b"{}", method="GET") == (204, {})
