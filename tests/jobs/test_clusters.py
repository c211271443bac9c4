"""Gangs over several nodes with GPUs, on a real Slurm with several slurmds and a real Ray with several raylets."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from slurm_cluster import missing_reason, slurm_cluster

from windlass.errors import ConfigError, PeerTimeout
from windlass.jobs.schedulers.base import ProcessSpec, Scheduler
from windlass.jobs.schedulers.configs import KnownScheduler, create_scheduler
from windlass.jobs.schedulers.ray import NICENESS, RaySchedulerConfig
from windlass.jobs.schedulers.slurm import SlurmOptions, SlurmSchedulerConfig
from windlass.jobs.train_controller import TrainController
from windlass.net.server import ControlServer

NO_SLURM = missing_reason()
NO_RAY = "" if importlib.util.find_spec("ray") else "ray is not installed"
pytestmark = [
    pytest.mark.cluster,
    # Ray does not close its own sockets and files.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
RANK = str(Path(__file__).parents[1] / "support" / "where_rank.py")
TOKEN = "a-token"
GPUS_PER_NODE = 4
OPTIONS = {
    "engine-*": SlurmOptions(
        options=("--constraint=node1feature",),
        srun_options=("--chdir=/usr",),
        prefix=("/usr/bin/env", "CONTAINER=yes"),
    )
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("slurm", marks=pytest.mark.skipif(bool(NO_SLURM), reason=NO_SLURM)),
        pytest.param("ray", marks=pytest.mark.skipif(bool(NO_RAY), reason=NO_RAY)),
    ],
)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Start two nodes of 4 GPUs each, and yield Ray's address; empty for Slurm."""
    if request.param == "ray":
        from ray.cluster_utils import Cluster

        ray = Cluster()
        try:
            for node in ("node0", "node1"):
                variables = {"RAY_NODE": node, NICENESS: "0"}
                ray.add_node(num_cpus=8, num_gpus=GPUS_PER_NODE, env_vars=variables)
            yield ray.address
        finally:
            ray.shutdown()
        return
    root = tmp_path_factory.mktemp("slurm")
    with (
        slurm_cluster(root, num_nodes=2, gpus_per_node=GPUS_PER_NODE) as conf,
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        monkeypatch.setenv("SLURM_CONF", str(conf))
        yield ""


@asynccontextmanager
async def opened(cluster: str, log_dir: Path) -> AsyncIterator[Scheduler]:
    config: KnownScheduler = SlurmSchedulerConfig(host="127.0.0.1", processes=OPTIONS)
    if cluster:
        config = RaySchedulerConfig(address=cluster)
    async with create_scheduler(config, log_dir) as scheduler:
        yield scheduler


SHOW = (
    "import os;"
    "print(*(os.environ.get(name, '') for name in"
    " ('CUDA_VISIBLE_DEVICES', 'SLURMD_NODENAME', 'CONTAINER')), os.getcwd(), flush=True);"
)


def gang(name: str, num_gpus: int, num_nodes: int = 2) -> ProcessSpec:
    command = (sys.executable, "-c", "import signal; signal.pause()")
    return ProcessSpec(name=name, command=command, num_nodes=num_nodes, num_gpus=num_gpus)


async def test_ranks_over_two_nodes_find_each_other_and_have_gpus_of_their_own(
    cluster: str, tmp_path: Path
) -> None:
    """Check four ranks with one GPU each in one reservation, and a process next to rank 2 that sees GPUs from rank 2's on."""
    server = ControlServer(host="127.0.0.1", port=0, token=TOKEN)
    async with opened(cluster, tmp_path) as scheduler:
        controller = TrainController(
            scheduler,
            command=(sys.executable, RANK),
            world_size=4,
            num_nodes=2,
            num_gpus=1,
            token=TOKEN,
        )
        controller.mount(server)
        await server.start()
        try:
            await controller.start(server.url, deadline_s=90)
            answers = await controller.call("where", deadline_s=30)
            beside = ProcessSpec(
                name="beside",
                command=(sys.executable, "-c", SHOW),
                colocate_with="trainer-0",
                node=1,
                gpus=(0, 1),
            )
            await scheduler.start(beside)
            assert (await asyncio.wait_for(scheduler.wait("beside"), 30)).returncode == 0
            shown = (await scheduler.log_tail("beside")).split()
            for wrong, says in (
                ({"gpus": (2,)}, r"gpus must be in \[0, 2\).* got 2"),
                ({"node": 2}, r"'beside': node must be below 2, got 2"),
            ):
                with pytest.raises(ConfigError, match=says):
                    await scheduler.start(msgspec.structs.replace(beside, **wrong))
        finally:
            await controller.close(grace_s=5)
            await server.close()
    assert all(answer == answers[0] for answer in answers)
    ranks = answers[0]
    assert [rank["RANK"] for rank in ranks] == ["0", "1", "2", "3"]
    assert {rank["WORLD_SIZE"] for rank in ranks} == {"4"}
    assert {(rank["LOCAL_RANK"], rank["LOCAL_WORLD_SIZE"]) for rank in ranks} == {("0", "1")}
    assert len({(rank["MASTER_ADDR"], rank["MASTER_PORT"]) for rank in ranks}) == 1
    nodes = [rank["RAY_NODE"] or rank["SLURMD_NODENAME"] for rank in ranks]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    gpus = [rank["CUDA_VISIBLE_DEVICES"] for rank in ranks]
    assert all(len(gpu.split(",")) == 1 for gpu in gpus)
    assert len({*zip(nodes, gpus, strict=True)}) == 4
    assert shown[0] == f"{gpus[2]},{gpus[3]}"


async def test_processes_over_several_nodes_get_the_address_of_the_first_node(
    cluster: str, tmp_path: Path
) -> None:
    show = (sys.executable, "-c", "import os; print(os.environ.get('WINDLASS_FIRST_NODE'))")
    first = ProcessSpec(name="first", command=show, num_nodes=2)
    second = msgspec.structs.replace(first, name="second", colocate_with="first", node=1)
    async with opened(cluster, tmp_path) as scheduler:
        said = []
        for spec in (first, second, ProcessSpec(name="alone", command=show)):
            await scheduler.start(spec)
            assert (await asyncio.wait_for(scheduler.wait(spec.name), 30)).returncode == 0
            said.append((await scheduler.log_tail(spec.name)).strip())
    address = cluster.rpartition(":")[0] or "127.0.0.1"
    assert said == [address, address, "None"]


async def test_a_gang_waits_until_all_its_processes_can_start(cluster: str, tmp_path: Path) -> None:
    async with opened(cluster, tmp_path) as scheduler:
        await scheduler.start(gang("holds", 3, num_nodes=1))
        await scheduler.wait_healthy("holds", deadline_s=30)
        await scheduler.start(gang("waits", 2))
        with pytest.raises(PeerTimeout, match="waits is still queued"):
            await scheduler.wait_healthy("waits", deadline_s=1)
        # The waiting gang must not reserve a part of its GPUs: two of the other node, and the last of the first.
        for name in ("other", "last"):
            await scheduler.start(gang(name, {"other": 3, "last": 1}[name], num_nodes=1))
        if not cluster:
            # Slurm gives GPUs out in the order of submission, so later jobs wait behind the gang.
            await scheduler.delete("other")
            await scheduler.delete("last")
        else:
            await scheduler.wait_healthy("other", deadline_s=30)
            await scheduler.wait_healthy("last", deadline_s=30)
            await scheduler.delete("other")
        await scheduler.delete("holds")
        await scheduler.wait_healthy("waits", deadline_s=30)


@pytest.mark.parametrize("cluster", ["slurm"], indirect=True)
async def test_options_of_slurm_reach_the_right_jobs_and_steps(
    cluster: str, tmp_path: Path
) -> None:
    async with opened(cluster, tmp_path) as scheduler:
        shown = {}
        for name in ("engine-a", "trainer-0"):
            await scheduler.start(
                ProcessSpec(name=name, command=(sys.executable, "-c", SHOW), num_gpus=2, gpus=(1,))
            )
            assert (await asyncio.wait_for(scheduler.wait(name), 30)).returncode == 0
            shown[name] = (await scheduler.log_tail(name)).splitlines()[0]
    assert shown["engine-a"] == "1 node1 yes /usr"
    assert shown["trainer-0"] == f"1 node0  {Path.cwd()}"
