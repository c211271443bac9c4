"""Engines and trainers whose weights and caches do not fit into the memory that they share.

`test_embedded_sleep.py` has an engine in a process of its own that is refused.
"""

from __future__ import annotations

import pytest

from windlass.control.connect_messages import Hello, TurnRoom
from windlass.control.turn_room import too_large
from windlass.layout.manifest import Role
from windlass.memory.room import HOST
from windlass.net.messages import PROTOCOL_VERSION

GPU = "00112233"


def hello(worker: str, room: TurnRoom, *, host: str = "here", releases: bool = False) -> Hello:
    group, rank = worker.split("/")
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        worker=worker,
        incarnation=worker,
        role=Role.TRAINER if group == "trainer" else Role.ENGINE,
        group=group,
        rank=int(rank),
        world_size=2,
        manifest=b"",
        offers=(),
        host=host,
        room=room,
        releases=releases,
    )


def trainer(nbytes: int, *, name: str = GPU, host: str = "here", releases: bool = True) -> Hello:
    return hello("trainer/0", TurnRoom(name, 100, nbytes), host=host, releases=releases)


def engine(
    weights: int, caches: int = 0, *, worker: str = "a/0", name: str = GPU, size: int = 100
) -> Hello:
    return hello(worker, TurnRoom(name, size, weights, caches))


def test_weights_must_fit_beside_those_of_the_trainer() -> None:
    assert too_large([trainer(60)], [engine(40)]) == {}
    found = too_large([trainer(60)], [engine(20), engine(21, worker="b/0")])
    assert found == dict.fromkeys(
        ("a", "b"),
        "a/0, b/0: the weights need 41 bytes and the weights of trainer/0 take 60 bytes, but the memory of GPU 00112233 has 100 "
        "bytes; connect the trainer with replica='host' and free its weights before it publishes",
    )
    assert too_large([trainer(0)], [engine(20), engine(21, worker="b/0")]) == {}


def test_caches_must_fit_beside_weights_that_the_trainer_keeps() -> None:
    assert too_large([trainer(60)], [engine(40, 60)]) == {}, "the trainer releases its weights"
    (reason,) = too_large([trainer(60, releases=False)], [engine(40, 1)]).values()
    assert reason.startswith(
        "a/0: weights and caches need 41 bytes and the weights of trainer/0 take 60 bytes,"
    )
    assert reason.endswith("KV cache, or free the weights in connect_trainer(release=...)")
    (reason,) = too_large([trainer(60)], [engine(40, 61)]).values()
    assert "need 101 bytes, but the memory of" in reason
    assert reason.endswith("bytes; give the engine a smaller KV cache")


@pytest.mark.parametrize(
    ("others", "own"),
    [
        (trainer(90, name="another GPU"), engine(40)),
        (trainer(90, name=HOST, host="elsewhere"), engine(40, name=HOST)),
        (trainer(90), engine(40, size=0)),
    ],
    ids=["another GPU", "another host", "an engine that does not sleep"],
)
def test_only_ranks_on_one_memory_are_compared(others: Hello, own: Hello) -> None:
    assert too_large([others], [own]) == {}


def test_a_gpu_is_known_on_every_host_and_host_memory_is_not() -> None:
    assert too_large([trainer(90, host="elsewhere")], [engine(40)])
    assert too_large([trainer(90, name=HOST)], [engine(40, name=HOST)])
