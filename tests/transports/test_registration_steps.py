"""Regions that are registered in steps: pieces cross the seams on either side."""

from __future__ import annotations

from contextlib import ExitStack

import msgspec
import numpy as np
import pytest

from windlass.errors import ConfigError, RegionError, TransportUnavailable
from windlass.testing.peer_process import PeerProcess
from windlass.testing.transport_conformance import NBYTES, Rig, scattered
from windlass.transfer.arena import Arena
from windlass.transports.mooncake.native import MooncakeProtocol
from windlass.transports.mooncake.transport import MooncakeConfig
from windlass.transports.nixl.native import NixlWire
from windlass.transports.nixl.transport import NixlConfig
from windlass.transports.registry import create_transport

KINDS: dict[str, MooncakeConfig | NixlConfig] = {
    "mooncake": MooncakeConfig(protocol=MooncakeProtocol.TCP),
    "nixl": NixlConfig(wire=NixlWire.CMA),
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(("here", "there"), [(1 << 20, 3 << 18), (0, 1 << 20)])
def test_a_region_registered_in_steps_is_written_across_its_seams(
    kind: str, here: int, there: int
) -> None:
    plain = KINDS[kind]
    with ExitStack() as stack:
        try:
            sender = create_transport(msgspec.structs.replace(plain, max_registration_nbytes=here))
        except TransportUnavailable as error:
            pytest.skip(str(error))
        stack.callback(sender.close)
        arena = Arena(sender, NBYTES)
        stack.callback(arena.close)
        arena.bytes.view(np.uint64)[:] = np.arange(NBYTES // 8, dtype=np.uint64) * 2654435761
        config = msgspec.structs.replace(plain, max_registration_nbytes=there)
        rig = Rig(sender, arena, stack.enter_context(PeerProcess(config, NBYTES)))
        pieces = scattered(40, 200_000, 3)
        rig.write(rig.batch(*pieces))
        rig.check_peer(rig.expected(*pieces), "pieces that cross seams")
        rig.write(rig.batch([0], [0], [NBYTES]))
        rig.check_peer(arena.bytes, "everything")
        rig.peer.unregister()
        rig.peer.register()
        rig.write(rig.batch([8], [0], [NBYTES - 8]))
        assert rig.peer.read(0, 64) == arena.bytes[8:72].tobytes()


def test_an_invalid_step_is_refused() -> None:
    for nbytes in (-4096, 1, 4097):
        with pytest.raises(ConfigError, match="max_registration_nbytes"):
            MooncakeConfig(max_registration_nbytes=nbytes)
        with pytest.raises(ConfigError, match="max_registration_nbytes"):
            NixlConfig(max_registration_nbytes=nbytes)


def test_a_peer_that_names_a_step_of_bytes_is_refused() -> None:
    try:
        sender = create_transport(KINDS["mooncake"])
    except TransportUnavailable as error:
        pytest.skip(str(error))
    with ExitStack() as stack:
        stack.callback(sender.close)
        arena = Arena(sender, 1 << 16)
        stack.callback(arena.close)
        rig = Rig(sender, arena, stack.enter_context(PeerProcess(KINDS["mooncake"], 1 << 16)))
        for key in ("1", "0", "-4096", "x", "4" * 40, "\u0664096"):
            region = msgspec.structs.replace(rig.peer.region, key=key)
            rig.refused(rig.batch([0], [0], [16], regions=(region,)), RegionError)
