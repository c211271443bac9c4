"""Ranks of a trainer meet at a controller; if a rank fails, all ranks get its error at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch exports it, and its stubs do not

from windlass.errors import ConfigError, PeerUnreachable
from windlass.integrations.hosted import HostAddress, TrainerRanks

NUM_RANKS = 3
DEADLINE_S = 60.0
TOLD_S = 15.0
ADDRESS = HostAddress("http://127.0.0.1:1", "secret of a role")


@dataclass
class Meeting:
    """Ranks as threads that share one store."""

    happened: list[str] = field(default_factory=list)
    changed: threading.Lock = field(default_factory=threading.Lock)

    def note(self, what: str) -> None:
        with self.changed:
            self.happened.append(what)

    def hold(self, host: Callable[[], HostAddress], connect: Callable[[int], None]) -> list[str]:
        """Let all ranks meet, and return the error of each rank; empty for none."""
        store = HashStore()

        def meet(rank: int) -> str:
            ranks = TrainerRanks(rank, NUM_RANKS, store, "ranks")

            def connected(address: HostAddress) -> None:
                assert address == ADDRESS
                connect(rank)
                self.note(f"{rank} connected")

            try:
                ranks.meet("servers", host, connected, lambda: self.note("joined"), DEADLINE_S)
            except (ConfigError, PeerUnreachable) as error:
                return f"{type(error).__name__}: {error}"
            return ""

        began_s = time.monotonic()
        with ThreadPoolExecutor(NUM_RANKS) as pool:
            errors = [*pool.map(meet, range(NUM_RANKS))]
        assert time.monotonic() - began_s < TOLD_S
        return errors


def test_servers_join_when_every_rank_has_connected() -> None:
    meeting = Meeting()
    assert meeting.hold(lambda: ADDRESS, lambda _: None) == [""] * NUM_RANKS
    assert meeting.happened[-1] == "joined"
    assert sorted(meeting.happened[:-1]) == [f"{rank} connected" for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("failing", range(NUM_RANKS))
def test_every_rank_fails_at_once_when_one_cannot_connect(failing: int) -> None:
    def connect(rank: int) -> None:
        if rank == failing:
            raise ConfigError("no transport")

    meeting = Meeting()
    errors = meeting.hold(lambda: ADDRESS, connect)
    assert "joined" not in meeting.happened
    assert errors[failing] == "ConfigError: no transport"
    for error in errors[:failing] + errors[failing + 1 :]:
        assert error.startswith("PeerUnreachable")
        assert f"rank {failing} of the trainer: ConfigError: no transport" in error


def test_every_rank_fails_at_once_when_there_is_no_controller() -> None:
    def host() -> HostAddress:
        raise ConfigError("no token")

    meeting = Meeting()
    first, *others = meeting.hold(host, lambda _: None)
    assert first == "ConfigError: no token"
    assert others == ["PeerUnreachable: rank 0 of the trainer: ConfigError: no token"] * len(others)
    assert not meeting.happened


def test_a_host_address_is_printed_without_its_token() -> None:
    assert ADDRESS.token not in repr(ADDRESS)
