"""Any bytes from a peer become a value or a named error, soon, and within bounded memory."""

from __future__ import annotations

import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from fake_agents import engine_manifest, fake_hello, trainer_manifest
from fake_fleet import TOKEN, FakeFleet
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from windlass.errors import WindlassError
from windlass.jobs.train_worker import CONTROLLER_FRAMES, RANK_FRAMES
from windlass.layout.manifest import ShardManifest
from windlass.net.line_file import read_lines
from windlass.planning.plan import TransferPlan
from windlass.planning.planner import plan_transfer
from windlass.rollout import messages as rollout
from windlass.transfer.disk_files import DiskEntry, DiskIndex, read_index
from windlass.transfer.relay_wire import End, decode_frame, encode_frame
from windlass.updates.journal import JournalEntry
from windlass.updates.messages import (
    Abort,
    Announce,
    Done,
    Envelope,
    Reply,
    Verify,
    decode_agent_frame,
    decode_controller_frame,
    encode,
)

MAX_PEAK_NBYTES = 32 << 20
NESTED = b"\x91" * 50_000
"""Lists in lists, deeper than any stack."""

TRAINERS = tuple(trainer_manifest(f"trainer/{i}", i, 2) for i in range(2))
ENGINE = engine_manifest("a/0", 2)
PLAN = plan_transfer(TRAINERS, (ENGINE,))
OUTCOME = rollout.RolloutOutcome(
    task_id="t",
    attempt=1,
    status=rollout.OutcomeStatus.ACCEPTED,
    result=rollout.Partial((1, 2), (-0.5, -0.25), (3, 3)),
    engine="a",
    worker="w",
    finished_at=1.0,
    value=msgspec.msgpack.encode({"score": 1}),
)
TASK = rollout.RolloutTask(
    task_id="t",
    attempt=1,
    prompt_ids=(1, 2),
    sampling=rollout.SamplingParams(max_new_tokens=4),
    engine=rollout.EngineTarget("a", "http://a"),
    deadline_s=1.0,
    arguments=msgspec.msgpack.encode([1]),
)
INDEX = DiskIndex(1, "trainer/0", "f", 4, "00", (DiskEntry("w", "w", (0, 0), (1, 4)),), {"w": "v"})


def read_index_of(data: bytes) -> object:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "v00000001"
        home.mkdir()
        (home / "trainer%2F0.json").write_bytes(data)
        (home / "f").write_bytes(b"four")
        return read_index(Path(folder), 1, "trainer/0")


def read_journal(data: bytes) -> object:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return read_lines(Path(file.name), JournalEntry)


def use_manifest(data: bytes) -> object:
    """As the controller does with the manifest of a Hello."""
    manifest = ShardManifest.decode(data)
    if manifest.role is ENGINE.role:
        return plan_transfer(TRAINERS, (manifest,))
    return plan_transfer((manifest, TRAINERS[1]), (ENGINE,))


DECODERS: dict[str, tuple[Callable[[bytes], Any], tuple[bytes, ...]]] = {
    "agent frame": (
        decode_agent_frame,
        (
            encode(fake_hello(ENGINE, group="a")),
            encode(Announce(3, 1)),
            encode(Reply(1, 2, 3, Done("away"))),
        ),
    ),
    "controller frame": (
        decode_controller_frame,
        (encode(Envelope(1, 2, 3, Verify(4, {"t": "00"}))), encode(Envelope(1, 2, 4, Abort("x")))),
    ),
    "manifest": (use_manifest, (ENGINE.encode(), TRAINERS[0].encode())),
    "plan": (TransferPlan.decode, (PLAN.encode(),)),
    "worker frame": (
        rollout.WORKER_FRAMES.decode,
        (
            encode(
                rollout.WorkerHello(
                    protocol_version=8,
                    name="w",
                    incarnation="i",
                    max_concurrent=1,
                    attempts=(rollout.AttemptKey("t", 1),),
                )
            ),
            encode(rollout.CompletionBatch(1, (msgspec.Raw(encode(OUTCOME)),))),
            encode(Reply(1, 1, 0, None)),
        ),
    ),
    "outcome": (lambda data: rollout.decode_outcome(msgspec.Raw(data)), (encode(OUTCOME),)),
    "rollout controller frame": (
        rollout.CONTROLLER_FRAMES.decode,
        (encode(Envelope(1, 1, 0, rollout.TaskBatch((TASK,)))), encode(rollout.CompletionAck(1))),
    ),
    "training batch": (
        rollout.TRAINING_BATCHES.decode,
        (encode(rollout.TrainingBatch(1, ())),),
    ),
    "train controller frame": (CONTROLLER_FRAMES.decode, (b"\x80",)),
    "train rank frame": (RANK_FRAMES.decode, (b"\x80",)),
    "relay frame": (decode_frame, (encode_frame(End())[4:],)),
    "disk index": (read_index_of, (msgspec.json.encode(INDEX),)),
    "journal": (
        read_journal,
        (b'{"kind":"started","epoch":1,"round":0,"version":-1}\n',),
    ),
}

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=16),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


def damaged(valid: bytes, draw: Callable[[st.SearchStrategy[Any]], Any]) -> bytes:
    """A valid message with bytes changed, put in, or left out."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.integers(0, 4)):
            case 0 if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case 1 if data:
                data[at] = draw(st.integers(0, 255))
            case 2:
                data[at:at] = draw(st.binary(min_size=1, max_size=9))
            case 3:
                del data[at : at + draw(st.integers(1, 16))]
            case _:
                del data[at:]
    return bytes(data)


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.data_too_large])
@given(data=st.data())
def test_any_bytes_become_a_value_or_a_named_error(name: str, data: st.DataObject) -> None:
    decode, valid = DECODERS[name]
    kind = data.draw(st.integers(0, 3))
    if kind == 0:
        raw = data.draw(st.binary(max_size=64))
    elif kind == 1:
        raw = msgspec.msgpack.encode(data.draw(plain))
    else:
        raw = damaged(data.draw(st.sampled_from(valid)), data.draw)
    try:
        decode(raw)
    except WindlassError:
        return


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(
    "raw",
    [
        NESTED,
        b"\x81\xa4type" + NESTED,
        b"\x82\xa4type\xa5reply\xa7unknown" + NESTED,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"[" * 100_000,
        b"\n" * 1000,
        b"\xff\xfe" * 1000,
        b'{"kind":"started","epoch":' + b"9" * 6000 + b"}\n",
    ],
    ids=[
        "nested",
        "nested-tag",
        "nested-field",
        "array",
        "map",
        "bin",
        "json",
        "lines",
        "utf",
        "int",
    ],
)
def test_bombs_are_refused_within_bounded_memory(name: str, raw: bytes) -> None:
    decode, _ = DECODERS[name]
    tracemalloc.start()
    try:
        decode(raw)
    except WindlassError:
        pass
    finally:
        _, peak_nbytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_nbytes < MAX_PEAK_NBYTES


@given(value=st.binary(max_size=16))
@example(value=b"\xc1")
@example(value=NESTED)
@settings(max_examples=30, deadline=None)
def test_what_is_opaque_in_a_message_is_checked_where_the_message_is(value: bytes) -> None:
    """Or its owner would fail in the middle of using it."""
    outcome = msgspec.msgpack.encode(
        {**msgspec.to_builtins(OUTCOME, builtin_types=(bytes,)), "value": value}
    )
    try:
        decoded = rollout.decode_outcome(msgspec.Raw(outcome))
    except WindlassError:
        return
    if value:
        msgspec.msgpack.decode(decoded.value)


@pytest.mark.parametrize("path", ["/v1/status", "/v1/agents", "/v1/callback"])
@pytest.mark.parametrize(
    "token", ["Bearer \udcff\udcfe", "Bearer", "", "Basic \u00e9", "Bearer " + "x" * 4000]
)
async def test_a_token_of_any_bytes_is_refused(path: str, token: str) -> None:
    import asyncio

    async with FakeFleet() as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        head = (
            f"GET {path} HTTP/1.1\r\nHost: a\r\nAuthorization: {token}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode("utf-8", "surrogateescape"))
        status = (await asyncio.wait_for(reader.readline(), 10)).split()[1]
        assert status in {b"401", b"400"}
        writer.close()
        await writer.wait_closed()


async def test_a_callback_of_any_bytes_is_a_bad_request() -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with FakeFleet() as rig, aiohttp.ClientSession(headers=headers) as http:
        for body in (b"", b"\xc1", NESTED, b"\x80", msgspec.msgpack.encode({"type": 1})):
            async with http.post(rig.server.url + "/v1/callback", data=body) as response:
                assert response.status == 400
