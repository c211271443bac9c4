"""An engine rank receives pushed tensors and folders as an engine would load them, and refuses wrong values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from windlass.backends.push_halves import PushReceiver, PushSender
from windlass.checkpoint_files import ADAPTER, INDEX
from windlass.config import CollectiveFabric
from windlass.errors import ConfigError, PlanError, TransferFailed
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role

ROWS, WIDTH = 6, 5
NAMES = ("embed", "norm")


class Rank:
    """Rank with the last four of six rows of two float16 tensors, one of which has two names."""

    def __init__(self) -> None:
        builder = ManifestBuilder("engine/0", Role.ENGINE)
        box = Box((2, 0), (4, WIDTH))
        for name in NAMES:
            builder.add_parameter(name, nbytes=2 * box.numel, dtype=DType.FLOAT16)
            builder.add_shard(name, (ROWS, WIDTH), box, name)
        builder.add_alias("head", "embed")
        self.served = {name: np.zeros((4, WIDTH), "<f2") for name in NAMES}
        addresses = [int(memory.ctypes.data) for memory in self.served.values()]
        self.receiver = PushReceiver(builder.build(), addresses, "127.0.0.1")
        self.receiver.begin()

    def read(self, folder: Path) -> None:
        self.receiver.read_files(str(folder))
        self.receiver.apply()

    def expect(self, **first: int) -> None:
        for name, value in first.items():
            wanted = tensor(value)[2:].half().numpy()
            assert np.array_equal(self.served[name], wanted, equal_nan=True)


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.receiver.close()


def tensor(first: int, *shape: int) -> torch.Tensor:
    """Return a float32 tensor whose elements all differ; by default it has the shape of the model's tensors."""
    sizes = shape or (ROWS, WIDTH)
    return torch.arange(first, first + int(np.prod(sizes)), dtype=torch.float32).reshape(sizes)


def save(folder: Path, file: str, **first: int) -> None:
    save_file({name: tensor(value) for name, value in first.items()}, folder / file)


@pytest.mark.parametrize("shape", [(2 * ROWS, WIDTH), (ROWS, 2 * WIDTH), (ROWS * WIDTH,)], ids=str)
def test_tensor_of_another_shape_is_refused(
    tmp_path: Path, rank: Rank, shape: tuple[int, ...]
) -> None:
    """The rank took its box out of a larger tensor, and served a part of another model."""
    save_file({"embed": tensor(0, *shape), "norm": tensor(100)}, tmp_path / "model.safetensors")
    with pytest.raises(PlanError, match=r"shape of 'embed' must be \(6, 5\), got"):
        rank.read(tmp_path)
    assert not rank.served["embed"].any()


def test_tied_tensors_must_have_equal_values_in_the_files(tmp_path: Path, rank: Rank) -> None:
    save(tmp_path, "model-1.safetensors", embed=1, norm=40)
    save(tmp_path, "model-2.safetensors", head=2)
    with pytest.raises(TransferFailed, match="ties 'embed' and 'head', but the files contain"):
        rank.read(tmp_path)
    equal = tensor(7)
    equal[3, 3] = np.nan
    save_file({"embed": equal.half(), "norm": tensor(70)}, tmp_path / "model-1.safetensors")
    save_file({"head": equal}, tmp_path / "model-2.safetensors")
    rank.read(tmp_path)
    rank.expect(norm=70)
    assert np.array_equal(rank.served["embed"], equal[2:].half().numpy(), equal_nan=True)


def test_files_that_the_index_does_not_name_are_not_read(tmp_path: Path, rank: Rank) -> None:
    """Files of an older save with other names stay in the folder."""
    save(tmp_path, "model-00.safetensors", embed=3, norm=33)
    (tmp_path / "shards").mkdir()
    save(tmp_path, "shards/model-1.safetensors", embed=7)
    save(tmp_path, "model-2.safetensors", norm=77)
    names = {"embed": "shards/model-1.safetensors", "norm": "model-2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    rank.read(tmp_path)
    rank.expect(embed=7, norm=77)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-2\.safetensors does not exist, but"):
        rank.read(tmp_path)


@pytest.mark.parametrize("files", [("model-1", "model-2"), ("model-2", "model-10")], ids=str)
def test_the_later_of_two_files_with_the_same_tensor_wins(
    tmp_path: Path, rank: Rank, files: tuple[str, str]
) -> None:
    save(tmp_path, f"{files[0]}.safetensors", embed=2, norm=22)
    save(tmp_path, f"{files[1]}.safetensors", embed=10)
    rank.read(tmp_path)
    rank.expect(embed=10, norm=22)


def test_tensors_of_an_adapter_are_read_too(tmp_path: Path, rank: Rank) -> None:
    save(tmp_path, ADAPTER, embed=4, norm=44, unused=1)
    rank.read(tmp_path)
    rank.expect(embed=4, norm=44)


def sender_of(deadline_s: float) -> PushSender:
    """Return the sender of a group with the rank."""
    return PushSender(
        "g",
        ("t/0", "engine/0"),
        host="127.0.0.1",
        bucket_nbytes=4096,
        fabric=CollectiveFabric.GLOO,
        deadline_s=deadline_s,
    )


def push(rank: Rank, *buckets: dict[str, torch.Tensor]) -> None:
    """Push tensors to the rank over gloo, one call of `fill` for each bucket; raise the rank's first error."""
    fabric, sender = CollectiveFabric.GLOO, sender_of(20.0)
    with ThreadPoolExecutor(1) as pool:
        try:
            joined = pool.submit(rank.receiver.join_named, sender.offer, fabric, 20.0)
            sender.join(None)
            joined.result()
            for bucket in buckets:
                specs = sender.fill(bucket)
                sent = pool.submit(sender.send, 20.0)
                rank.receiver.receive_bucket("g", specs, sender.stamp, 20.0)
                sent.result()
        finally:
            sender.close()


def test_a_bucket_of_another_call_is_not_taken(rank: Rank) -> None:
    """A leader may have sent a bucket in a call that this rank never got."""
    sender = sender_of(20.0)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(rank.receiver.join_named, sender.offer, CollectiveFabric.GLOO, 20.0)
        sender.join(None)
        joined.result()
        specs = sender.fill({"embed": tensor(9), "norm": tensor(99)})
        pool.submit(sender.send, 20.0)
        with pytest.raises(TransferFailed, match="the bucket belongs to another call"):
            rank.receiver.receive_bucket("g", specs, "00" * 16, 20.0)
        with pytest.raises(TransferFailed, match="has failed; form it again"):
            rank.receiver.receive_bucket("g", specs, sender.stamp, 20.0)
    sender.close()
    with pytest.raises(PlanError, match=r"[23] tensors did not arrive"):
        rank.receiver.apply()


@pytest.mark.parametrize("together", [True, False], ids=["one bucket", "two buckets"])
def test_pushed_tied_tensors_may_have_nan_at_the_same_places(rank: Rank, together: bool) -> None:
    embed, norm = tensor(1), tensor(100)
    embed[3, 3] = float("nan")
    first, second = {"embed": embed, "norm": norm}, {"head": embed.clone()}
    push(rank, *([first | second] if together else [first, second]))
    rank.receiver.apply()
    wanted = embed[2:].half().numpy()
    assert np.array_equal(rank.served["embed"], wanted, equal_nan=True)
    rank.expect(norm=100)


def test_an_update_with_different_tied_tensors_is_never_applied(rank: Rank) -> None:
    with pytest.raises(TransferFailed, match="ties 'head' to 'embed', but they have arrived"):
        push(rank, {"embed": tensor(1), "norm": tensor(100)}, {"head": tensor(9)})
    with pytest.raises(PlanError, match="did not arrive"):
        rank.receiver.apply()
    assert not rank.served["embed"].any()
