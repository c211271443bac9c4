"""A real SGLang or vLLM engine over two nodes of a real Slurm or Ray: updates, death of one part, and restart."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from servers import ENVIRONMENT, FLAGS, ORACLE, ROOT, VENVS, Layout, Server, save
from slurm_cluster import missing_reason, slurm_cluster

from tools.entry_points import write_entry_points
from windlass.controller import Controller
from windlass.jobs import Recipe, Task, load_config
from windlass.jobs.config import LaunchConfig
from windlass.jobs.launch import run_job
from windlass.jobs.schedulers.base import Scheduler
from windlass.jobs.schedulers.ray import NICENESS
from windlass.net.addresses import free_port
from windlass.rollout import RolloutGroup
from windlass.rollout.messages import TrainingSample

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.engines,
    pytest.mark.timeout(900),
]
NO_RAY = "" if importlib.util.find_spec("ray") else "ray is not installed"
PARTS = ("engine", "engine-node-1")
JOB = """
steps = 3
output_dir = "{folder}/out"
transport = "auto"
start_deadline_s = 400.0

[environment]
PYTHONPATH = "{root}/src:{root}/tests/support:{installed}"
HF_HUB_OFFLINE = "1"
TOKENIZERS_PARALLELISM = "false"

[scheduler]
{scheduler}

[recipe]
file = "{root}/examples/launch/recipe.py"

[trainer]
script = "{root}/tests/support/saving_rank.py"
arguments = ["{folder}"]

[[engines]]
name = "engine"
kind = "{engine}"
model = "{folder}/0.model"
port = {port}
tensor_parallel_size = 2
num_nodes = 2
python = "{python}"
arguments = {arguments}

[engines.environment]
GLOO_SOCKET_IFNAME = "lo"
{environment}

[rollout]
groups_per_step = 1
samples_per_group = 2
num_workers = 0
batch_deadline_s = 400.0
sampling = {{ max_new_tokens = 8, ignore_eos = true }}

[update]
mode = "staged"
"""


class Watching(Recipe):
    """A recipe that kills the engine's part on the second node before the second step.

    Attributes:
        held: digests of both ranks before each step, and digests of a fresh load of the last published version.
        versions: versions of the tokens in each step's samples.
    """

    def __init__(self, folder: Path, server: Server) -> None:
        self._folder, self._server = folder, server
        self.held: list[tuple[list[dict[str, str]], list[dict[str, str]]]] = []
        self.versions: list[set[int]] = []

    def tasks(self) -> Iterator[Task]:
        for number in itertools.count():
            yield Task(prompt_ids=(1, 2, number % 60))

    def rewards(self, group: RolloutGroup) -> Sequence[float]:
        return [1.0] * len(group.rollouts)

    def started(self, config: LaunchConfig, controller: Controller, scheduler: Scheduler) -> None:
        self._scheduler, self._controller = scheduler, controller

    async def before_step(self, step: int, samples: Sequence[TrainingSample]) -> None:
        published = self._controller.coordinator.fleet.published
        self.held.append(
            (
                await asyncio.to_thread(self._server.digests),
                await asyncio.to_thread(
                    self._server.digests_of_fresh_load, self._folder / str(published)
                ),
            )
        )
        self.versions.append({v for s in samples for v in s.versions})
        if step == 1:
            await self._kill_a_part()

    async def _kill_a_part(self) -> None:
        """Kill a part of the engine, and wait until the engine has left the fleet and joined again."""
        coordinator = self._controller.coordinator
        gone, back = asyncio.Event(), asyncio.Event()

        def look() -> None:
            if coordinator.fleet.missing(1, ["engine"]):
                gone.set()
            elif gone.is_set():
                back.set()

        coordinator.subscribe(look)
        await self._scheduler.signal(PARTS[1], signal.SIGKILL)
        await back.wait()


@contextmanager
def cluster_of(kind: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Start two nodes on this host, and yield their address and the job's settings of the cluster."""
    if kind == "slurm":
        folder.mkdir()
        with (
            slurm_cluster(folder, num_nodes=2) as conf,
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            monkeypatch.setenv("SLURM_CONF", str(conf))
            yield "127.0.0.1", 'kind = "slurm"\nhost = "127.0.0.1"'
        return
    from ray.cluster_utils import Cluster

    ray = Cluster()
    try:
        for _ in range(2):
            ray.add_node(num_cpus=6, env_vars={NICENESS: "0"})
        host = ray.address.rpartition(":")[0]
        controller = f'[controller]\nhost = "0.0.0.0"\nadvertise_host = "{host}"'
        yield host, f'kind = "ray"\naddress = "{ray.address}"\n\n{controller}'
    finally:
        ray.shutdown()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            "slurm",
            marks=pytest.mark.skipif(bool(missing_reason()), reason=missing_reason()),
        ),
        pytest.param("ray", marks=pytest.mark.skipif(bool(NO_RAY), reason=NO_RAY)),
    ],
)
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
async def test_an_engine_over_two_nodes_serves_every_version(
    engine: str, kind: str, tmp_path: Path
) -> None:
    """Check that served versions equal fresh loads on both nodes, before and after a restart of the engine."""
    save("dense", 1, tmp_path / "0.model")
    (tmp_path / "0.model" / "config.json").rename(tmp_path / "0.json")
    (tmp_path / "0.model" / "config.json").write_text((tmp_path / "0.json").read_text())
    if not (python := VENVS[engine] / "bin/python").exists():
        pytest.skip(f"no {python}: make engines installs {engine}")
    port = free_port()
    variables = {
        "sglang": {"SGLANG_HOST_IP": "127.0.0.1", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
        "vllm": {"VLLM_HOST_IP": "127.0.0.1"},
    }[engine] | ENVIRONMENT[engine]
    arguments = [*FLAGS[engine], *ORACLE[engine]]
    job, said = tmp_path / "job.toml", list[str]()
    with cluster_of(kind, tmp_path / "cluster") as (host, scheduler):
        url = f"http://{host}:{port}"
        server = Server(SimpleNamespace(), url, engine, Layout(tp=2), tmp_path)  # type: ignore[arg-type]
        recipe = Watching(tmp_path, server)
        job.write_text(
            JOB.format(
                installed=write_entry_points(tmp_path / "installed"),
                folder=tmp_path, root=ROOT, port=port, arguments=arguments, engine=engine,
                python=python, scheduler=scheduler,
                environment="\n".join(f'{name} = "{value}"' for name, value in variables.items()),
            )
        )  # fmt: skip
        summary = await run_job(load_config(job), notify=said.append, recipe=recipe)
    assert (summary.steps, summary.version) == (3, 3)
    assert len(recipe.held) == 3
    for held, afresh in recipe.held:
        assert len(held) == 2
        assert held == afresh
    assert len({str(held) for held, _ in recipe.held}) == 3
    # Answers are at most one version older than the weights that are trained on them.
    for step, versions in enumerate(recipe.versions):
        assert versions <= {step - 1, step}
    assert len(recipe.versions) == 3
    restarts = [line for line in said if "starting it again" in line]
    assert len(restarts) == 1
    assert restarts[0].startswith(PARTS)
