"""Decoders turn any bytes from a peer into a value or a named error, quickly and in bounded memory."""

from __future__ import annotations

import asyncio
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from decoders import DECODERS, OUTCOME
from fake_fleet import TOKEN, FakeFleet
from hypothesis import HealthCheck, example, given, settings, target
from hypothesis import strategies as st

import windlass
from windlass.errors import WindlassError
from windlass.planning.replicated import HELD
from windlass.rollout import messages as rollout

MAX_PEAK_NBYTES = 32 << 20
NESTED = b"\x91" * 50_000
"""Nested lists, deeper than any stack."""
SOURCE = str(Path(windlass.__file__).parent)


def outside() -> bytes:
    """Return a row that wraps around 64 bits and so seems to be inside the parameter."""
    row = np.zeros(1, HELD)
    row["sizes"], row["run"], row["row_nbytes"] = 1, 1, 4
    row["sizes"][0, 0], row["strides"][0, 0] = (1 << 62) + 1, 4
    return row.tobytes()


FOUND = {"boxes that reach beyond 64 bits": ("replicated boxes", outside())}
"""Bytes that fuzzing found: name -> decoder, bytes."""

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
    """Return a valid message with some bytes changed, inserted or removed."""
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


class LinesSeen:
    """Recorder of the product's lines that run inside the block."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()

    def __enter__(self) -> LinesSeen:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        if event == "line":
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._trace


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.data_too_large])
@given(data=st.data())
def test_any_bytes_become_a_value_or_a_named_error(name: str, data: st.DataObject) -> None:
    """Hypothesis varies bytes that reach more lines.

    `make fuzz` searches longer, guided by coverage.
    """
    decoder = DECODERS[name]
    kind = data.draw(st.integers(0, 3))
    if kind == 0:
        raw = data.draw(st.binary(max_size=64))
    elif kind == 1:
        raw = msgspec.msgpack.encode(data.draw(plain))
    else:
        raw = damaged(data.draw(st.sampled_from(decoder.valid)), data.draw)
    with LinesSeen() as seen:
        decoder.check(raw)
    target(float(len(seen.lines)))


@pytest.mark.parametrize("name", DECODERS)
def test_every_decoder_accepts_its_valid_messages(name: str) -> None:
    for message in DECODERS[name].valid:
        DECODERS[name].decode(message)


@pytest.mark.parametrize("what", FOUND)
def test_inputs_that_fuzzing_found_are_decoded_or_refused(what: str) -> None:
    name, raw = FOUND[what]
    DECODERS[name].check(raw)


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
        b'{"type":"started","epoch":' + b"9" * 6000 + b"}\n",
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
    tracemalloc.start()
    try:
        DECODERS[name].check(raw)
    finally:
        _, peak_nbytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_nbytes < MAX_PEAK_NBYTES


@given(value=st.binary(max_size=16))
@example(value=b"\xc1")
@example(value=NESTED)
@settings(max_examples=30, deadline=None)
def test_a_decoder_checks_opaque_values_of_its_message(value: bytes) -> None:
    """Without this check the owner would fail while using the value."""
    outcome = msgspec.msgpack.encode(
        {**msgspec.to_builtins(OUTCOME, builtin_types=(bytes,)), "value": value}
    )
    try:
        decoded = rollout.decode_outcome(outcome)
    except WindlassError:
        return
    if value:
        msgspec.msgpack.decode(decoded.value)


@pytest.mark.parametrize("path", ["/v1/status", "/v1/agents", "/v1/callback"])
@pytest.mark.parametrize(
    "token", ["Bearer \udcff\udcfe", "Bearer", "", "Basic \u00e9", "Bearer " + "x" * 4000]
)
async def test_a_token_of_any_bytes_is_refused(path: str, token: str) -> None:
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
