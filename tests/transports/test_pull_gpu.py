"""`pull` on GPU memory: the reader's GPU copies out of another process. One GPU is enough for both processes."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch

from windlass.errors import PeerUnreachable, RegionError
from windlass.testing.transport_conformance import scattered
from windlass.transports.base import WriteBatch
from windlass.transports.peers import RemoteRegion
from windlass.transports.pull import PullTransport

NBYTES = 8 << 20
GUARD = 0xEE
ANSWER_S = 120.0

pytestmark = [pytest.mark.gpu]
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


def serve(pipe: Connection) -> None:
    """Own memory that is read into. Answer each command with the bytes."""
    transport = PullTransport(gpu=0)
    target = torch.full((NBYTES,), GUARD, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    pipe.send(transport.register(target.data_ptr(), NBYTES).remote)
    while pipe.recv() is not None:
        torch.cuda.synchronize()
        pipe.send(target.cpu().numpy())
        target.fill_(GUARD)
        torch.cuda.synchronize()
        pipe.send("filled")
    transport.close()


class Reader:
    """Process that reads."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,))
        self.process.start()
        theirs.close()
        self.region: RemoteRegion = self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(ANSWER_S)
        return self._pipe.recv()

    def held(self) -> np.ndarray:
        """Return the bytes, and fill the memory with `GUARD` again."""
        self._pipe.send("held")
        found: np.ndarray = self._answer()
        assert self._answer() == "filled"
        return found

    def close(self) -> None:
        with suppress(OSError):
            self._pipe.send(None)
        self.process.kill()
        self.process.join(30)


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.close()


@pytest.fixture
def transport() -> Iterator[PullTransport]:
    transport = PullTransport(gpu=0)
    yield transport
    transport.close()


def batch(
    source: torch.Tensor, region: RemoteRegion, local: Any, remote: Any, nbytes: Any
) -> WriteBatch:
    return WriteBatch(
        endpoint=region.endpoint,
        local_addresses=np.uint64(source.data_ptr()) + np.asarray(local, np.uint64),
        remote_addresses=np.uint64(region.address) + np.asarray(remote, np.uint64),
        nbytes=np.asarray(nbytes, np.uint64),
        regions=(region,),
    )


def distinct() -> torch.Tensor:
    words = torch.arange(NBYTES // 8, dtype=torch.int64, device="cuda:0") * 2654435761
    torch.cuda.synchronize()
    return words.view(torch.uint8)


def test_scattered_pieces_of_several_allocations_arrive(
    reader: Reader, transport: PullTransport
) -> None:
    sources = [distinct(), distinct() + 1]
    regions = [transport.register(s.data_ptr(), NBYTES) for s in sources]
    for seed, source in enumerate(sources):
        local, remote, nbytes = scattered(700, 9000, seed)
        transport.write(batch(source, reader.region, local, remote, nbytes), deadline_s=30)
        image, own = np.full(NBYTES, GUARD, np.uint8), source.cpu().numpy()
        for a, b, size in zip(local.tolist(), remote.tolist(), nbytes.tolist(), strict=True):
            image[b : b + size] = own[a : a + size]
        assert (reader.held() == image).all()
    for region in regions:
        transport.unregister(region)


def test_the_writer_can_free_its_memory_after_a_write(
    reader: Reader, transport: PullTransport
) -> None:
    """Check that the reader has unmapped it: the driver frees memory only when no process maps it."""
    size = 1 << 30
    source = torch.zeros(size, dtype=torch.uint8, device="cuda:0")
    region = transport.register(source.data_ptr(), size)
    transport.write(batch(source, reader.region, [0], [0], [NBYTES]), deadline_s=30)
    assert not reader.held().any()
    transport.unregister(region)
    before, _ = torch.cuda.mem_get_info()
    del source
    torch.cuda.empty_cache()
    after, _ = torch.cuda.mem_get_info()
    assert after - before >= size


def test_memory_that_is_not_registered_at_either_end_is_refused(
    reader: Reader, transport: PullTransport
) -> None:
    source = distinct()
    good = batch(source, reader.region, [0], [0], [64])
    with pytest.raises(RegionError, match="local registered memory"):
        transport.write(good, deadline_s=30)
    region = transport.register(source.data_ptr(), NBYTES)
    wide = RemoteRegion(reader.region.endpoint, reader.region.address, NBYTES + 64)
    with pytest.raises(RegionError, match="memory that the reader has registered"):
        transport.write(batch(source, wide, [0], [NBYTES], [64]), deadline_s=30)
    transport.write(good, deadline_s=30)
    assert (reader.held()[:64] == source[:64].cpu().numpy()).all()
    transport.unregister(region)


def test_a_dead_reader_is_unreachable(reader: Reader, transport: PullTransport) -> None:
    source = distinct()
    region = transport.register(source.data_ptr(), NBYTES)
    reader.process.kill()
    reader.process.join(30)
    with pytest.raises(PeerUnreachable):
        transport.write(batch(source, reader.region, [0], [0], [64]), deadline_s=30)
    transport.unregister(region)
