"""The plugins of `examples/plugins` are installed separately and used by name."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

import windlass
from windlass.cli.checks import Status, check_flags
from windlass.config import find_backend
from windlass.engines.spec import ENGINES, EngineOptions
from windlass.errors import ConfigError
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role
from windlass.layout.naming.place import Coords, Geometry, place
from windlass.layout.naming.tables import FAMILIES
from windlass.testing.resting_engine import RestingEngine
from windlass.trainers.client import TrainerClient
from windlass.trainers.weights import TrainerWeights
from windlass.transfer.base import ParameterMemory
from windlass.transfer.bindings import LinkOutcome, LinkStatus, Written
from windlass.transports.registry import create_transport, parse_transport

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("engine", "family", "command", "backend")
TOKEN = "secret of the test"
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide the folder where pip installed copies of the plugins.

    Building leaves folders behind.
    """
    folder = tmp_path_factory.mktemp("plugins")
    for name in NAMES:
        shutil.copytree(ROOT / "examples" / "plugins" / name, folder / name)
    site = folder / "site"
    command = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation")
    subprocess.run(
        (*command, "--no-index", "--target", str(site), *(str(folder / name) for name in NAMES)),
        check=True,
        timeout=200,
    )
    return site


@pytest.fixture
def site(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the plugins on the path of this process and its children."""
    monkeypatch.setenv("WINDLASS_TOKEN", TOKEN)
    monkeypatch.setenv("PYTHONPATH", f"{installed}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(str(installed))
    return installed


@pytest.mark.usefixtures("site")
async def test_an_engine_joins_a_fleet_and_serves_the_published_version(tmp_path: Path) -> None:
    (tmp_path / "shape.json").write_text(json.dumps({"num_tokens": NUM_TOKENS}))
    async with windlass.Controller(token=TOKEN) as controller:
        command = ENGINES.find("tiny").command(
            EngineOptions(
                name="mine", model=str(tmp_path / "shape.json"), controller=controller.url
            )
        )
        with running(command) as engine:
            assert engine.stdout is not None
            line = await asyncio.to_thread(engine.stdout.readline)
            url = json.loads(line)["url"]
            # Version 0 counts tokens upwards, version 1 downwards.
            for version, step in enumerate((1, -1)):
                chances = 5 * torch.eye(NUM_TOKENS).roll(step, 1)
                report = await asyncio.to_thread(published, chances, controller.url, version)
                assert report.engines == ("mine",)
                answer = await asked(url, [3], 4)
                assert answer["output_ids"] == [(3 + step * n) % NUM_TOKENS for n in range(1, 5)]
                assert answer["meta_info"]["output_token_versions"] == [version] * 4

            lag = await asyncio.to_thread(windlass_command, "lag", controller.url)
            assert (lag.returncode, lag.stdout) == (0, "mine: 0\n")
    refused = check_flags("tiny --freeze")
    assert refused.status is Status.FAILS
    assert "weights that are frozen take no update" in refused.found


@contextmanager
def running(command: tuple[str, ...]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def published(chances: torch.Tensor, controller: str, version: int) -> windlass.UpdateReport:
    weights = torch.nn.ParameterDict({"bigrams": chances.clone()})
    with windlass.connect_trainer(weights, controller=controller, token=TOKEN) as trainer:
        return trainer.publish(version).result()


async def asked(url: str, input_ids: list[int], count: int) -> dict[str, Any]:
    body = {"input_ids": input_ids, "sampling_params": {"max_new_tokens": count}}
    async with aiohttp.ClientSession() as http, http.post(f"{url}/generate", json=body) as answer:
        found: dict[str, Any] = await answer.json(content_type=None)
        return found


def windlass_command(*words: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "windlass.cli.main", *words)
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


GEOMETRY = Geometry(
    num_query_groups=2, queries_per_group=2, head_dim=2, vocab_size=5, hidden_size=4
)
TP = 2
LOCAL = {
    "embedding.word_embeddings.weight": (4, 4),
    "decoder.final_layernorm.weight": (4,),
    "decoder.layers.0.self_attention.linear_qkv.weight": (8, 4),
    "decoder.layers.0.self_attention.linear_proj.weight": (4, 4),
    "decoder.layers.0.mlp.linear_fc1.weight": (6, 4),
    "decoder.layers.0.mlp.linear_fc2.weight": (4, 3),
}
"""Shapes on each tensor-parallel rank, with the vocabulary padded to 8 rows."""
CHECKPOINT = {
    "gyre.tokens.weight": (5, 4),
    "gyre.norm.weight": (4,),
    "gyre.blocks.0.query.weight": (8, 4),
    "gyre.blocks.0.key.weight": (4, 4),
    "gyre.blocks.0.value.weight": (4, 4),
    "gyre.blocks.0.mix.weight": (4, 8),
    "gyre.blocks.0.gate.weight": (6, 4),
    "gyre.blocks.0.up.weight": (6, 4),
    "gyre.blocks.0.down.weight": (4, 6),
}


@pytest.mark.usefixtures("site")
async def test_a_family_is_planned_and_published_under_its_own_names() -> None:
    async with windlass.Controller(token=TOKEN) as controller:
        (served,), expected = await asyncio.to_thread(publish_gyre, controller.url, ("gyre",))
    for name, tensor in served.items():
        np.testing.assert_array_equal(tensor, expected[name], err_msg=name)


@pytest.mark.usefixtures("site")
async def test_a_backend_moves_the_bytes_of_an_update() -> None:
    """The update goes to two engines in turn."""
    find_backend.cache_clear()
    backend = windlass.PluginBackend("waves", {"width": 1})
    config = windlass.ControlConfig(backend=backend, min_engines=2)
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        held, expected = await asyncio.to_thread(publish_gyre, controller.url, ("gyre", "twin"))
    for served in held:
        for name, tensor in served.items():
            np.testing.assert_array_equal(tensor, expected[name], err_msg=name)


class Recorder:
    """Recorder of the backend's requests to Windlass."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    def write(self, version: int, destinations: tuple[str, ...], deadline_s: float) -> Written:
        self.asked.append(destinations)
        links = tuple(LinkOutcome(name, LinkStatus.OK, 1, "") for name in destinations)
        return Written(links, pack_s=0.0, wire_s=1.0)


@pytest.mark.usefixtures("site")
def test_the_waves_backend_writes_waves_of_the_given_width() -> None:
    waves, inner = importlib.import_module("windlass_waves_backend"), Recorder()
    written = waves.Waves({"width": 2}).sender(inner, "").write(1, ("a", "b", "c"), 5.0)
    assert inner.asked == [("a", "b"), ("c",)]
    assert [link.destination for link in written.links] == ["a", "b", "c"]
    assert written.wire_s == 2.0
    with pytest.raises(ConfigError, match=r"a width of 1 or more, got \{'width': 0\}"):
        waves.Waves({"width": 0})


def publish_gyre(
    controller: str, engines: tuple[str, ...]
) -> tuple[list[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Return the engines' tensors after an update by two Megatron ranks, and the expected ones.

    In `linear_qkv` the query group of rank 0 comes before the one of rank 1.
    """
    first = iter(range(1, 10_000, 100))
    expected = {
        name: np.arange(begin := next(first), begin + np.prod(shape), dtype=np.float32).reshape(
            shape
        )
        for name, shape in CHECKPOINT.items()
    }
    held = [{n: np.zeros(s, np.float32) for n, s in CHECKPOINT.items()} for _ in engines]
    with ExitStack() as stack:
        for engine, served in zip(engines, held, strict=True):
            stack.enter_context(engine_of(engine, served, controller))
        trainers = [stack.enter_context(rank_of(rank, expected, controller)) for rank in range(TP)]
        with ThreadPoolExecutor(TP) as pool:
            reports = list(pool.map(lambda trainer: trainer.publish(1).result(), trainers))
        assert all(report.engines == engines for report in reports)
    return held, expected


def engine_of(name: str, served: dict[str, np.ndarray], controller: str) -> windlass.EngineClient:
    transport = create_transport(parse_transport("cma"), towards=controller)
    builder = ManifestBuilder(f"{name}/0", Role.ENGINE)
    for tensor, memory in served.items():
        builder.add_parameter(tensor, nbytes=memory.nbytes, dtype=DType.FLOAT32)
        whole = Box((0,) * memory.ndim, memory.shape)
        builder.add_shard(tensor, memory.shape, whole, tensor)
    return windlass.EngineClient(
        windlass.EngineWeights(
            manifest=builder.build(),
            addresses=[memory.ctypes.data for memory in served.values()],
            regions=[transport.register(m.ctypes.data, m.nbytes) for m in served.values()],
        ),
        transport=transport,
        hooks=RestingEngine(),
        controller=controller,
        token=TOKEN,
    )


def rank_of(rank: int, weights: dict[str, np.ndarray], controller: str) -> TrainerClient:
    """Return a tensor-parallel rank, described by its family as in `describe_megatron_trainer`."""
    family = FAMILIES.find("gyre")
    builder = ManifestBuilder(f"trainer/{rank}", Role.TRAINER)
    memories = {name: local_part(name, rank, weights) for name in LOCAL}
    for name, memory in memories.items():
        assert memory.shape == LOCAL[name], name
        placed = place(family, name, memory.shape, GEOMETRY, Coords(tp=(rank, TP)))
        builder.add_parameter(
            name, nbytes=memory.nbytes, dtype=DType.FLOAT32, padding_nbytes=placed.padding * 4
        )
        for shard in placed.shards:
            builder.add_shard(
                shard.tensor,
                shard.global_shape,
                shard.box,
                name,
                offset_bytes=shard.offset * 4,
                strides_bytes=tuple(step * 4 for step in shard.strides),
            )
    parameters = [ParameterMemory(m.ctypes.data, m.nbytes) for m in memories.values()]

    def located() -> list[ParameterMemory]:
        # The closure keeps the memory alive as long as the rank.
        assert memories
        return parameters

    return TrainerClient(
        TrainerWeights(
            manifest=builder.build(),
            parameters=located,
        ),
        transport=create_transport(parse_transport("cma"), towards=controller),
        controller=controller,
        token=TOKEN,
        job="gyre",
        world_size=TP,
    )


def local_part(name: str, rank: int, weights: dict[str, np.ndarray]) -> np.ndarray:
    """Return Megatron-core's part of a parameter, written without the naming table."""

    def of(tensor: str, axis: int) -> np.ndarray:
        return np.split(weights[f"gyre.blocks.0.{tensor}.weight"], TP, axis)[rank]

    match name.rsplit(".", 2)[-2]:
        case "word_embeddings":
            padded = np.zeros((8, 4), np.float32)
            padded[:5] = weights["gyre.tokens.weight"]
            part = padded[4 * rank : 4 * rank + 4]
        case "final_layernorm":
            part = weights["gyre.norm.weight"]
        case "linear_qkv":
            part = np.concatenate([of("query", 0), of("key", 0), of("value", 0)])
        case "linear_proj":
            part = of("mix", 1)
        case "linear_fc1":
            part = np.concatenate([of("gate", 0), of("up", 0)])
        case _:
            part = of("down", 1)
    return np.array(part, order="C")
