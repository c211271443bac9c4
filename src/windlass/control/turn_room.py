"""Check that trainer and engines which take turns on one memory fit into it, before the first engine sleeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from windlass.control.connect_messages import Hello
from windlass.wording import listed


def too_large(trainers: Iterable[Hello], engines: Iterable[Hello]) -> Mapping[str, str]:
    """Return the engines whose update cannot fit into the memory that they share with trainers: name -> reason.

    This checks two moments of an update. While an engine reads new weights, the trainer's weights are in memory too. After
    the trainer's `release`, the engine maps its caches. The check does not know how much memory other libraries use.
    An update may therefore run out of memory even if it passes the check.

    Args:
        trainers: `Hello` messages of all trainer ranks.
        engines: `Hello` messages of all engine ranks. Ranks that do not sleep have no `Hello.room`.
    """
    holders: dict[tuple[str, str], list[Hello]] = {}
    for hello in trainers:
        holders.setdefault(_place(hello), []).append(hello)
    readers: dict[tuple[str, str], list[Hello]] = {}
    for hello in engines:
        if hello.room.nbytes:
            readers.setdefault(_place(hello), []).append(hello)
    found: dict[str, str] = {}
    for place, ranks in readers.items():
        if why := _shortage(ranks, holders.get(place, [])):
            found |= {rank.group: why for rank in ranks}
    return found


def _place(hello: Hello) -> tuple[str, str]:
    """Return the identity of a rank's memory. The UUID of a GPU is unique, and every host has host memory."""
    return (hello.host if hello.room.is_host else "", hello.room.name)


def _shortage(engines: list[Hello], trainers: list[Hello]) -> str:
    """Return why these engine and trainer ranks do not fit into the memory that they share; empty if they may fit."""
    room = engines[0].room
    names = listed([rank.worker for rank in engines])
    where = f"the memory of {'the host' if room.is_host else f'GPU {room.name}'}"
    weights = sum(rank.room.weights_nbytes for rank in engines)
    held = sum(rank.room.weights_nbytes for rank in trainers)
    if weights + held > room.nbytes:
        return (
            f"{names}: the weights need {weights} bytes{_beside(trainers, held)}, but {where} has {room.nbytes} "
            "bytes; connect the trainer with replica='host' and free its weights before it publishes"
        )
    kept = [rank for rank in trainers if not rank.releases]
    held = sum(rank.room.weights_nbytes for rank in kept)
    needed = weights + sum(rank.room.caches_nbytes for rank in engines)
    if needed + held > room.nbytes:
        advice = "give the engine a smaller KV cache" + (
            ", or free the weights in connect_trainer(release=...)" if held else ""
        )
        return (
            f"{names}: weights and caches need {needed} bytes{_beside(kept, held)}, but {where} has {room.nbytes} "
            f"bytes; {advice}"
        )
    return ""


def _beside(trainers: list[Hello], nbytes: int) -> str:
    names = [rank.worker for rank in trainers if rank.room.weights_nbytes]
    return f" and the weights of {listed(names)} take {nbytes} bytes" if names else ""
