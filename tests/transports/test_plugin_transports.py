"""A transport of another distribution is found by its entry point and used.

The tests take the steps of a user: pip installs the package, and Windlass gets a name.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from windlass.envs import inherited_environment

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "examples" / "plugins" / "file_mmap"

UPDATE = """
import asyncio, ctypes
import numpy as np
import windlass
from windlass.layout.dtypes import DType
from windlass.layout.box import Box
from windlass.layout.manifest import ManifestBuilder, Role
from windlass.testing.resting_engine import RestingEngine
from windlass.transfer.arena import Arena
from windlass.transfer.base import ParameterMemory
from windlass.trainers.client import TrainerClient
from windlass.trainers.weights import TrainerWeights
from windlass.transports.registry import create_transport, parse_transport, transport_names

assert "file_mmap" in transport_names()
TOKEN = "t" * 32

def manifest(worker, role):
    builder = ManifestBuilder(worker, role)
    builder.add_parameter("w", nbytes=4096, dtype=DType.FLOAT32)
    builder.add_shard("w", (1024,), Box((0,), (1024,)), "w")
    return builder.build()

def opened():
    transport = create_transport(parse_transport("file_mmap"))
    return transport, Arena(transport, 4096)

def trainer(url):
    transport, arena = opened()
    arena.bytes[:] = np.arange(4096) % 251
    memory = (ParameterMemory(arena.address, 4096),)
    weights = TrainerWeights(manifest=manifest("trainer/0", Role.TRAINER), parameters=lambda: memory)
    with TrainerClient(weights, transport=transport, controller=url, token=TOKEN, registered=[arena.region]) as client:
        return client.publish(0, deadline_s=30).result()

async def main():
    async with windlass.Controller(token=TOKEN) as controller:
        transport, arena = opened()
        weights = windlass.EngineWeights(
            manifest=manifest("engine/0", Role.ENGINE), addresses=[arena.address], regions=[arena.region])
        engine = await asyncio.to_thread(lambda: windlass.EngineClient(
            weights, transport=transport, hooks=RestingEngine(), controller=controller.url, token=TOKEN,
            url="http://127.0.0.1:9"))
        report = await asyncio.to_thread(trainer, controller.url)
        assert report.engines == ("engine",), report
        assert (arena.bytes == np.arange(4096) % 251).all()
        print("updated over", report.transports)
        arena.close()
        await asyncio.to_thread(engine.close)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Provide the environment of a user who installed the package, without any network."""
    folder = tmp_path_factory.mktemp("plugin")
    # A build leaves files next to its sources.
    source = shutil.copytree(PLUGIN, folder / "source")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    run = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder / "site")]
    subprocess.run([*run, str(source)], check=True, timeout=120)
    inherited = inherited_environment()
    path = [str(folder / "site"), str(ROOT / "src"), inherited.get("PYTHONPATH", "")]
    return inherited | {"PYTHONPATH": ":".join(path), "TMPDIR": str(folder)}


def test_the_plugin_passes_the_suite_of_windlass(installed: dict[str, str], tmp_path: Path) -> None:
    test = shutil.copy(PLUGIN / "test_file_mmap.py", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)],
        env=installed,
        cwd=tmp_path,
        timeout=110,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


def test_an_update_travels_over_the_plugin(installed: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UPDATE],
        env=installed,
        cwd=tmp_path,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "updated over {'file_mmap': 1}\n"


def test_the_doctor_starts_the_plugin(installed: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "windlass.cli.main", "doctor", "--require", "file_mmap"],
        env=installed,
        cwd=tmp_path,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
