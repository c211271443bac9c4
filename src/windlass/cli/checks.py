"""The checks of `windlass doctor`: each looks at one thing and changes nothing."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from windlass.engines.versions import ENGINES, EngineReleases, installed_version, judge
from windlass.envs import environment_value
from windlass.errors import WindlassError
from windlass.transports.configs import parse_transport
from windlass.transports.registry import create_transport

__all__ = ["Finding", "Status", "run_checks"]

_RDMA_FOLDER = Path("/sys/class/infiniband")
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


class Status(StrEnum):
    """Whether it works, works with a limit, or does not."""

    WORKS = "works"
    LIMITED = "limited"
    FAILS = "fails"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `remedy` is empty where nothing is to be done."""

    name: str
    status: Status
    found: str
    remedy: str = ""


def run_checks(checkpoint: Path | None = None) -> tuple[Finding, ...]:
    """Every check, in the order of the report. `checkpoint`: see `windlass doctor --help`."""
    findings = [
        _transport("cma", "allow ptrace between processes of this user, or use --transport shm"),
        _transport("shm", "mount a tmpfs at /dev/shm"),
        _transport("mooncake", "pip install 'windlass[mooncake]' and the package libibverbs1"),
        _transport("nixl", "pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1"),
        _ptrace(),
        _locked_memory(),
        _network_cards(),
        _allocator(),
        _cuda(),
        *(_engine(engine) for engine in ENGINES.values()),
    ]
    if checkpoint is not None:
        findings.append(_checkpoint(checkpoint))
    return tuple(findings)


def _transport(name: str, remedy: str) -> Finding:
    try:
        transport = create_transport(parse_transport(name))
    except WindlassError as error:
        return Finding(name, Status.FAILS, str(error), remedy)
    try:
        report = transport.report()
        one_sided = "" if report.one_sided else "; the receiving process must run"
        return Finding(name, Status.WORKS, f"{report.protocol}, {report.detail}{one_sided}")
    finally:
        transport.close()


def _ptrace() -> Finding:
    name = "ptrace scope"
    if not _PTRACE_SCOPE.exists():
        return Finding(name, Status.WORKS, "no Yama: processes of one user may write each other")
    scope = _PTRACE_SCOPE.read_text().strip()
    if scope == "0":
        return Finding(name, Status.WORKS, "0")
    return Finding(
        name,
        Status.LIMITED,
        f"{scope}: cma needs CAP_SYS_PTRACE",
        "sysctl kernel.yama.ptrace_scope=0, add CAP_SYS_PTRACE, or use shm",
    )


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", Status.WORKS, "unlimited")
    return Finding(
        "locked memory",
        Status.LIMITED,
        f"{soft >> 10} KiB: RDMA registers no more than this",
        "ulimit -l unlimited, or --ulimit memlock=-1 for a container",
    )


def _network_cards() -> Finding:
    cards = sorted(p.name for p in _RDMA_FOLDER.iterdir()) if _RDMA_FOLDER.is_dir() else []
    if cards:
        return Finding("RDMA", Status.WORKS, ", ".join(cards))
    return Finding(
        "RDMA",
        Status.LIMITED,
        "no device: mooncake uses TCP between hosts",
        "expose /dev/infiniband to this container, if the host has cards",
    )


def _allocator() -> Finding:
    name = "allocator"
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = environment_value(variable)
        if "expandable_segments:true" in value.lower():
            return Finding(
                name,
                Status.FAILS,
                f"{variable}={value}: such memory cannot be registered or shared",
                f"unset expandable_segments in {variable} for engines",
            )
    return Finding(name, Status.WORKS, "no expandable segments asked for")


def _cuda() -> Finding:
    name = "CUDA peer access"
    try:
        import torch
    except ImportError:
        return Finding(name, Status.LIMITED, "torch is not installed", "pip install torch")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return Finding(name, Status.LIMITED, f"torch {torch.__version__}, no CUDA device")
    blocked = [
        f"{a}-{b}"
        for a in range(count)
        for b in range(count)
        if a != b and not torch.cuda.can_device_access_peer(a, b)
    ]
    if blocked:
        return Finding(
            name,
            Status.LIMITED,
            f"{count} devices, no peer access between {', '.join(blocked)}",
            "disable ACS, or keep trainer and engine ranks on connected devices",
        )
    return Finding(name, Status.WORKS, f"{count} devices, every pair")


def _engine(engine: EngineReleases) -> Finding:
    version = installed_version(engine)
    if not version:
        return Finding(
            engine.name,
            Status.LIMITED,
            "not in this environment",
            "run this with the engine's interpreter",
        )
    verdict = judge(engine, version)
    if verdict.refused:
        return Finding(
            engine.name, Status.FAILS, verdict.refused, "install a release of docs/capabilities.md"
        )
    if verdict.warnings:
        return Finding(
            engine.name,
            Status.LIMITED,
            "; ".join(verdict.warnings),
            "docs/capabilities.md says what each release has",
        )
    return Finding(engine.name, Status.WORKS, version)


def _checkpoint(folder: Path) -> Finding:
    from windlass.engines.capture.codes import checkpoint_specs

    try:
        specs = checkpoint_specs(folder)
    except WindlassError as error:
        return Finding(
            "checkpoint",
            Status.FAILS,
            str(error),
            "use a checkpoint in bfloat16, or in block float8 (docs/engines.md)",
        )
    elements = sum(spec.numel for spec in specs)
    return Finding(
        "checkpoint",
        Status.WORKS,
        f"{len(specs)} tensors; capture needs up to {elements * 8 >> 20} MiB per engine rank",
    )
