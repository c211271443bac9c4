"""A real Slurm cluster in a temporary directory: several nodes on this machine, with device files
as GPUs.

Every node is a slurmd with its own name and port (`slurmd -N`). A GPU is another /dev/null, which
gres.conf names. As with a real GPU, Slurm counts it, gives it to one job, and names it in
CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
SEARCH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
NUM_CPUS = 8
NODE_MIB = 4096


def missing_reason() -> str:
    """Return why no cluster can run here; empty if one can."""
    if os.geteuid() != 0:
        return "slurmd needs root"
    missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCH) is None]
    return f"{', '.join(missing)} not installed (tools/install_slurm.sh)" if missing else ""


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def slurm_cluster(root: Path, *, num_nodes: int = 1, gpus_per_node: int = 0) -> Iterator[Path]:
    """Start munged, slurmctld and slurmds; yield the path of slurm.conf.

    Args:
        root: folder for all files.
        num_nodes: number of nodes: node0, node1, and so on, each with `NUM_CPUS` cores.
        gpus_per_node: number of device files.
    """
    nodes = [f"node{number}" for number in range(num_nodes)]
    host = socket.gethostname().split(".")[0]
    root.chmod(0o755)
    key = root / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    ports = free_ports(1 + num_nodes)
    conf = root / "slurm.conf"
    for name in ("state", *(f"spool-{node}" for node in nodes)):
        (root / name).mkdir()
    gres = ""
    if gpus_per_node:
        gres = f"Gres=gpu:{gpus_per_node}"
        for number in range(gpus_per_node):
            os.mknod(root / f"gpu{number}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        files = f"{root}/gpu[0-{gpus_per_node - 1}]"
        (root / "gres.conf").write_text(f"NodeName={','.join(nodes)} Name=gpu File={files}\n")
    lines = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={NUM_CPUS} "
        f"RealMemory={NODE_MIB} Feature={node}feature {gres} State=UNKNOWN"
        for node, port in zip(nodes, ports[1:], strict=True)
    )
    conf.write_text(
        f"""ClusterName=windlass
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
CredType=cred/munge
SlurmctldPort={ports[0]}
GresTypes=gpu
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
KillWait=1
{lines}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""
    )
    environment = {**os.environ, "SLURM_CONF": str(conf), "PATH": SEARCH}
    munged = [
        *("munged", "--foreground", "--force", f"--key-file={key}"),
        *(f"--socket={root}/munge.sock", f"--pid-file={root}/munged.pid"),
        *(f"--log-file={root}/munged.log", f"--seed-file={root}/munged.seed"),
    ]
    started: list[subprocess.Popen[bytes]] = []
    try:
        # With --foreground, only the log shows that munged listens; the detached form returns once
        # it listens.
        del munged[1]
        subprocess.run(munged, env=environment, check=True, timeout=20)
        daemons = [["slurmctld", "-D", "-i"], *(["slurmd", "-D", "-N", node] for node in nodes)]
        for daemon in daemons:
            with (root / f"{daemon[0]}-{daemon[-1]}.out").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        daemon, env=environment, stdout=log, stderr=log, start_new_session=True
                    )
                )
        _wait_for_nodes(environment, num_nodes)
        yield conf
        _wait_for_idle(environment)
    finally:
        for each in reversed(started):
            each.send_signal(signal.SIGTERM)
        for each in reversed(started):
            try:
                each.wait(timeout=2)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait(timeout=5)
        pid_file = root / "munged.pid"
        if pid_file.exists():
            subprocess.run(
                [*munged[:1], "--stop", f"--socket={root}/munge.sock"],
                env=environment,
                check=False,
                timeout=10,
            )


def _wait_for_nodes(environment: dict[str, str], num_nodes: int) -> None:
    """Run a job: its end proves controller, nodes and credentials at once; srun itself waits."""
    last = ""
    for _ in range(20):
        done = subprocess.run(
            ["srun", f"--nodes={num_nodes}", "true"],
            env=environment,
            timeout=20,
            capture_output=True,
            check=False,
        )
        if done.returncode == 0:
            return
        last = done.stderr.decode()
        subprocess.run(["sleep", "0.25"], check=True)
    raise RuntimeError(f"slurm did not start: {last}")


def _wait_for_idle(environment: dict[str, str]) -> None:
    """Wait for the last job: a daemon that stops earlier leaves the job's processes behind."""
    listed = ""
    for _ in range(60):
        command = ["squeue", "--noheader", "--format=%i %T"]
        listed = subprocess.run(
            command, env=environment, timeout=20, capture_output=True, check=True, text=True
        ).stdout
        if not listed.strip():
            return
        subprocess.run(["sleep", "0.25"], check=True)
    raise RuntimeError(f"jobs are left: {listed}")
