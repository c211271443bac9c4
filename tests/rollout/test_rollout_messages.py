"""Messages between controller and workers, and the cost of decoding them."""

from __future__ import annotations

import asyncio
import re
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest

from windlass.errors import ConfigError, ProtocolError
from windlass.net.messages import encode
from windlass.rollout import SamplingParams
from windlass.rollout.messages import (
    CONTROLLER_FRAMES,
    SMALL_FRAME_NBYTES,
    WORKER_FRAMES,
    AttemptKey,
    CompletionBatch,
    EngineTarget,
    OutcomeStatus,
    Partial,
    RolloutOutcome,
    RolloutTask,
    TaskBatch,
    Turn,
    TurnIncrement,
    WorkerHello,
    decode_outcome,
    decode_outcomes,
)
from windlass.rollout.trajectories import whole_turns
from windlass.rollout.values import MAX_VALUE_ITEMS, MAX_VALUE_NBYTES, encode_value
from windlass.rollout.worker import MAX_OUTCOME_NBYTES, encode_for_controller

HELLO = WorkerHello(protocol_version=9, name="w", incarnation="i", max_concurrent=1)


def outcome(value: bytes = b"", num_tokens: int = 2) -> RolloutOutcome:
    tokens = tuple(range(num_tokens))
    return RolloutOutcome(
        task_id="t",
        attempt=1,
        status=OutcomeStatus.ACCEPTED,
        result=Partial(tokens, tuple(-t / 8 for t in tokens), tokens),
        engine="a",
        worker="w",
        finished_at=0.0,
        value=value,
    )


def encoded_with(value: bytes) -> bytes:
    """Encode an outcome without the checks of a worker."""
    builtins = msgspec.to_builtins(outcome(), builtin_types=(bytes,))
    return encode({**builtins, "value": value})


def lists(number: int) -> bytes:
    """Encode this number of empty lists: one byte each, but 64 in memory."""
    return b"\xdd" + (number - 1).to_bytes(4) + b"\x90" * (number - 1)


async def test_encoded_frames_decode_to_the_same_frames() -> None:
    small, large = outcome(), outcome(num_tokens=SMALL_FRAME_NBYTES // 8)
    for sent in ((small,), (small, large)):
        frame = CompletionBatch(7, tuple(encode(each) for each in sent))
        read = WORKER_FRAMES.decode(encode(frame))
        assert isinstance(read, CompletionBatch)
        assert (read.last, tuple(await decode_outcomes(read))) == (7, sent)
    task = RolloutTask(
        task_id="t",
        attempt=1,
        prompt_ids=(1, 2),
        sampling=SamplingParams(max_new_tokens=4),
        engine=EngineTarget("a", "http://a"),
        deadline_s=1.0,
    )
    batch = TaskBatch(2, (task,), (AttemptKey("u", 3),))
    assert CONTROLLER_FRAMES.decode(encode(batch)) == batch
    with pytest.raises(ProtocolError, match="frame of a worker of 3 bytes"):
        WORKER_FRAMES.decode(b"\x01\x02\x03")


@pytest.mark.parametrize("number", [MAX_VALUE_ITEMS + 1, 4 << 20, MAX_VALUE_NBYTES - 16])
def test_a_value_of_many_objects_is_refused_before_they_are_made(number: int) -> None:
    """It used to cost 78 bytes of memory per byte, and 6.6 s of the event loop for 16 MiB."""
    sent = encoded_with(lists(number))
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=f"at most {MAX_VALUE_ITEMS} values"):
            decode_outcome(sent)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 3 * len(sent)


@pytest.mark.parametrize(
    ("frame", "field"),
    [
        (
            {"type": "completions", "last": 1, "outcomes": msgspec.Raw(lists(8 << 20))},
            "outcomes",
        ),
        ({**msgspec.to_builtins(HELLO), "attempts": msgspec.Raw(lists(8 << 20))}, "attempts"),
    ],
    ids=["outcomes", "attempts"],
)
def test_a_frame_of_many_entries_is_refused_before_they_are_made(
    frame: dict[str, object], field: str
) -> None:
    sent = encode(frame)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=rf"length <= \d+ - at `\$.{field}`"):
            WORKER_FRAMES.decode(sent)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < len(sent)


def test_values_up_to_the_limits_are_decoded() -> None:
    for value in (lists(MAX_VALUE_ITEMS), encode(b"x" * (4 << 20)), encode(["é" * 9000] * 9)):
        assert decode_outcome(encoded_with(value)).value == value


@pytest.mark.parametrize("value", [b"\xc1", encode("x" * 9000)[:-1], encode([1] * 9000) + b"\x01"])
def test_a_value_that_is_not_msgpack_is_refused(value: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"value must be valid msgpack, got {len(value)} bytes"):
        decode_outcome(encoded_with(value))


def test_a_value_that_is_too_large_is_an_error_of_the_workflow() -> None:
    with pytest.raises(ConfigError, match=f"value must have at most {MAX_VALUE_NBYTES} bytes"):
        encode_value("value", b"x" * MAX_VALUE_NBYTES)
    with pytest.raises(ConfigError, match=f"value must contain at most {MAX_VALUE_ITEMS} values"):
        encode_value("value", [()] * MAX_VALUE_ITEMS)


async def test_the_event_loop_runs_while_a_large_batch_is_decoded() -> None:
    batch = CompletionBatch(1, (encoded_with(lists(MAX_VALUE_ITEMS)),) * 4)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    assert len(await decode_outcomes(batch)) == 4
    counting.cancel()
    assert turns > 4


def test_an_outcome_that_the_controller_would_refuse_is_sent_as_an_error() -> None:
    for large in (
        msgspec.structs.replace(outcome(), error="x" * MAX_OUTCOME_NBYTES),
        msgspec.structs.replace(outcome(), turns=(), value=encode(b"x" * (1 << 20))),
    ):
        sent = decode_outcome(encode_for_controller(large))
        if len(large.error) > 1:
            assert sent.status is OutcomeStatus.ERROR
            assert "the outcome cannot be sent: it must have at most" in sent.error
        else:
            assert sent == large


def test_an_outcome_that_cannot_be_encoded_is_sent_as_an_error() -> None:
    ids: Any = (np.int64(3),)
    turn = TurnIncrement((1, 2), Partial(ids, (-0.5,), (7,)), "stop")
    sent = decode_outcome(encode_for_controller(msgspec.structs.replace(outcome(), turns=(turn,))))
    assert sent.status is OutcomeStatus.ERROR
    assert "the outcome cannot be sent: Encoding objects of type numpy.int64" in sent.error


def test_whole_turns_of_an_older_journal_are_read() -> None:
    part = Partial((3, 4), (-0.5, -0.25), (7, 8))
    turns = (Turn((1, 2), part, "stop", "ab"), Turn((1, 2, 3, 4, 5), part, "length"))
    old = msgspec.to_builtins(outcome())
    old["turns"] = msgspec.to_builtins(turns)
    read = msgspec.json.decode(msgspec.json.encode(old), type=RolloutOutcome)
    assert whole_turns(read.turns) == turns


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        ({"earlier": 0, "num_shared": 5}, "turns[1] must share at most 4 tokens with an earlier turn"),
        ({"earlier": 1, "num_shared": 1}, "at most 0 tokens with an earlier turn, got 1 of turn 1"),
        ({"earlier": 0, "num_shared": -1}, "got -1 of turn 0"),
    ],
)  # fmt: skip
def test_an_outcome_with_tokens_that_no_turn_has_is_refused(
    turn: dict[str, int], says: str
) -> None:
    part = Partial((3, 4), (-0.5, -0.25), (7, 8))
    first = msgspec.to_builtins(Turn((1, 2), part, "stop"))
    wrong = {
        **msgspec.to_builtins(outcome(), builtin_types=(bytes,)),
        "turns": [first, {**first, **turn}],
    }
    with pytest.raises(ProtocolError, match=re.escape(says)):
        decode_outcome(encode(wrong))


def test_an_outcome_of_few_bytes_does_not_become_a_large_one() -> None:
    part = Partial()
    first = msgspec.to_builtins(Turn((1,) * 100_000, part, "stop"))
    again = {**msgspec.to_builtins(Turn((), part, "stop")), "earlier": 0, "num_shared": 100_000}
    wrong = {
        **msgspec.to_builtins(outcome(), builtin_types=(bytes,)),
        "turns": [first, *[again] * 200],
    }
    with pytest.raises(ProtocolError, match=f"must share at most {1 << 24} tokens, got 20000000"):
        decode_outcome(encode(wrong))
