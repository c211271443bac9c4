"""A real one-node Slurm cluster in a temporary directory."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
SEARCH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
NUM_CPUS = 8


def missing_reason() -> str:
    """Why there can be no cluster here; empty when there can."""
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
def slurm_cluster(root: Path) -> Iterator[Path]:
    """Start munged, slurmctld and slurmd; yields the path of slurm.conf."""
    host = socket.gethostname().split(".")[0]
    root.chmod(0o755)
    key = root / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    ports = free_ports(2)
    conf = root / "slurm.conf"
    for name in ("state", "spool"):
        (root / name).mkdir()
    conf.write_text(
        f"""ClusterName=windlass
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.log
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
NodeName={host} NodeAddr=127.0.0.1 CPUs={NUM_CPUS} State=UNKNOWN
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
        # --foreground says when it listens only in its log; the detached form returns when it does.
        del munged[1]
        subprocess.run(munged, env=environment, check=True, timeout=20)
        for daemon in (["slurmctld", "-D", "-i"], ["slurmd", "-D", "-N", host]):
            with (root / f"{daemon[0]}.out").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        daemon, env=environment, stdout=log, stderr=log, start_new_session=True
                    )
                )
        _wait_for_node(environment, host)
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


def _wait_for_node(environment: dict[str, str], host: str) -> None:
    """A job that ends proves controller, node and credentials at once; srun itself waits."""
    last = ""
    for _ in range(20):
        done = subprocess.run(
            ["srun", "-N1", "-w", host, "true"],
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
    """A daemon that stops before its last job has ended leaves that job's processes."""
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
