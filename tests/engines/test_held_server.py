"""A server whose engine is held after a round that ended badly says why instead of letting requests wait.

`tests/integrations/test_vllm_membership.py` has a live server.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from asgi import request

from windlass.control.engine_state import HoldCause
from windlass.engines.held_server import HeldRecord, HeldRoutes, held_for, note_held
from windlass.engines.private_routes import ALIVE_PATH, Message, key_folder

PORT = 8123
CONTROLLER = "http://10.0.0.2:8000"
HELD = HeldRecord(CONTROLLER, HoldCause.MIXED)
REFUSED = [
    *(("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"), ("POST", "/generate")),
    *(("POST", "/inference/v1/generate"), ("POST", "/v1/chat/completions")),
]
SERVED = [("GET", "/v1/models"), ("GET", "/metrics"), ("POST", "/tokenize"), ("POST", "/pause")]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the records of this test be in an own folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return key_folder()


async def app(_scope: Message, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


@pytest.mark.parametrize("root", ["", "/v1/m", "/api"])
async def test_held_server_refuses_with_the_reason_until_its_engine_resumes(root: str) -> None:
    routes = HeldRoutes(app, PORT)
    note_held(PORT, HELD)
    for method, path in REFUSED:
        status, said = await request(routes, method, root + path, b"", root_path=root)
        assert (status, f"update of the controller {CONTROLLER} did" in said["error"]) == (
            503,
            True,
        )
    for method, path in SERVED:
        assert (await request(routes, method, root + path, b"", root_path=root))[0] == 200
    note_held(PORT, None)
    for method, path in REFUSED:
        assert (await request(routes, method, root + path, b"", root_path=root))[0] == 200


@pytest.mark.parametrize("root", ["", "/v1/m"])
async def test_held_server_answers_a_supervisor_without_its_engine(root: str) -> None:
    """The engine's loop is blocked. A supervisor that gets no answer would end the engine before its next version."""

    async def blocked(_scope: Message, _receive: Any, _send: Any) -> None:
        await asyncio.Event().wait()

    routes = HeldRoutes(blocked, PORT)
    note_held(PORT, HELD)
    async with asyncio.timeout(5):
        status, said = await request(routes, "GET", root + ALIVE_PATH, b"", root_path=root)
    assert (status, f"update of the controller {CONTROLLER} did" in said["held"]) == (200, True)
    # The engine itself answers as soon as it is no longer held.
    note_held(PORT, None)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await request(routes, "GET", root + ALIVE_PATH, b"", root_path=root)


async def test_servers_of_other_ports_and_new_servers_are_not_held() -> None:
    note_held(PORT, HELD)
    other = HeldRoutes(app, PORT + 1)
    assert (await request(other, "GET", "/health", b""))[0] == 200
    # The server that was held has ended, and another one has started.
    again = HeldRoutes(app, PORT)
    assert (await request(again, "GET", "/health", b""))[0] == 200
    assert held_for(PORT) is None


def test_record_in_a_folder_of_all_users_is_ignored(folder: Path) -> None:
    note_held(PORT, HELD)
    assert held_for(PORT) == HELD
    folder.chmod(0o777)
    assert held_for(PORT) is None


@pytest.mark.parametrize(
    ("cause", "says"),
    [
        (HoldCause.MIXED, "may be of two versions"),
        (HoldCause.EMPTY, "has no weights"),
        (HoldCause.NO_VERSION, "has no version yet"),
        (HoldCause.NOT_RESUMED, "did not resume"),
    ],
)
async def test_each_cause_has_its_own_reason(cause: HoldCause, says: str) -> None:
    routes = HeldRoutes(app, PORT)
    note_held(PORT, HeldRecord(CONTROLLER, cause))
    status, said = await request(routes, "GET", "/health", b"")
    assert (status, said["error"].count(says)) == (503, 1)
    assert f"controller {CONTROLLER}" in said["error"]
    texts = ("two versions", "no weights", "no version", "not resume")
    assert sum(text in said["error"] for text in texts) == 1


def test_damaged_record_is_ignored(folder: Path) -> None:
    note_held(PORT, HELD)
    (folder / f"{PORT}.held").write_text(CONTROLLER)
    assert held_for(PORT) is None


def test_reader_never_sees_a_part_of_a_record() -> None:
    """The server would let a request wait for the blocked engine if it read an empty record."""
    note_held(PORT, HELD)
    is_over = threading.Event()

    def write() -> None:
        while not is_over.is_set():
            note_held(PORT, HELD)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        found = {held_for(PORT) for _ in range(2000)}
    finally:
        is_over.set()
        writer.join()
    assert found == {HELD}


def test_engine_without_a_server_has_no_record(folder: Path) -> None:
    note_held(0, HELD)
    note_held(0, None)
    assert not folder.exists()
