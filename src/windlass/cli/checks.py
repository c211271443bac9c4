"""The checks of `windlass doctor`: each looks at one thing and changes nothing."""

from __future__ import annotations

import os
import resource
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from windlass.cli.commands.bench import count_gpus
from windlass.engines.quantised import require_followed
from windlass.engines.spec import ENGINES, expandable_segments, refuse_options
from windlass.engines.versions import EngineReleases, device_of, installed_version, judge
from windlass.errors import ConfigError, WindlassError
from windlass.transports.base import MemoryType, TransportConfig, TransportOffer
from windlass.transports.choice import choose_transport
from windlass.transports.mooncake.native import WITHOUT_CUDA, is_installed
from windlass.transports.network import locks_without_limit
from windlass.transports.registry import config_type, create_transport, transport_names

_RDMA_FOLDER = Path("/sys/class/infiniband")
_VERBS_FOLDER = Path("/dev/infiniband")
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, not written
_USUAL_CONTAINER_MIB = 64
"""What Docker gives a container."""
_NOT_LOOKED_AT = frozenset({"auto", "memory"})
"""The one stands for the others, the other reaches no other process."""


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
        *_transports(),
        _ptrace(),
        _shared_memory(),
        _locked_memory(),
        _network_cards(),
        _allocator(),
        _peer_access(),
        *_engines(),
    ]
    if checkpoint is not None:
        findings.append(_checkpoint(checkpoint))
    return tuple(findings)


def _transports() -> list[Finding]:
    """Each transport of the registry, and what `auto` makes of those that start."""
    findings, offers = [], list[TransportOffer]()
    for name in transport_names():
        try:
            kind = config_type(name)
        except WindlassError as error:
            findings.append(Finding(name, Status.FAILS, str(error), "mend or remove its package"))
            continue
        needs_gpu = MemoryType.HOST not in kind.memory
        if name in _NOT_LOOKED_AT or (needs_gpu and count_gpus() == 0):
            continue
        finding, found = _start(kind())
        findings.append(_of_mooncake(finding) if name == "mooncake" else finding)
        offers += found
    return [*findings, *_automatic(offers)]


def _start(config: TransportConfig) -> tuple[Finding, tuple[TransportOffer, ...]]:
    try:
        transport = create_transport(config)
    except WindlassError as error:
        return Finding(config.name, Status.FAILS, str(error), config.remedy), ()
    try:
        report, traits, offers = transport.report(), transport.traits, transport.offers()
    finally:
        transport.close()
    reach = "processes of this host" if traits.same_host else "other hosts too"
    one_sided = "" if traits.one_sided else "; the receiving process must run"
    found = f"{report.protocol}, {report.detail}; reaches {reach}{one_sided}"
    return Finding(config.name, Status.WORKS, found), offers


def _automatic(offers: Sequence[TransportOffer]) -> list[Finding]:
    """What a link would take whose two ends are as this host is."""
    findings = []
    for kind in MemoryType:
        here = [offer for offer in offers if offer.traits.memory is kind]
        said = []
        for where, same_host in (("within this host", True), ("between hosts", False)):
            try:
                choice = choose_transport(here, here, same_host=same_host, same_address=True)
            except ConfigError:
                said.append(f"{where} none")
            else:
                said.append(f"{where} {choice.transport}")
        if here:
            findings.append(Finding(f"auto, {kind} memory", Status.WORKS, "; ".join(said)))
    return findings


def _of_mooncake(finding: Finding) -> Finding:
    extra = _mooncake_extra()
    install = f"pip install 'windlass[{extra}]' and the package libibverbs1"
    if finding.status is Status.FAILS:
        return replace(finding, remedy=install)
    if extra != "mooncake" and is_installed(WITHOUT_CUDA):
        return Finding(
            finding.name,
            Status.LIMITED,
            f"{finding.found}; {WITHOUT_CUDA} is built for host memory, and there are GPUs",
            f"pip uninstall {WITHOUT_CUDA}; {install}",
        )
    return finding


def _mooncake_extra() -> str:
    """The extra whose wheel takes the memory that is here: GPUs want that of their CUDA release."""
    if count_gpus() == 0:
        return "mooncake"
    try:
        import torch
    except ImportError:
        release = ""
    else:
        release = torch.version.cuda or ""
    return "mooncake-cuda12" if release.startswith("12.") else "mooncake-cuda13"


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
    if locks_without_limit():
        return Finding("locked memory", Status.WORKS, "unlimited, by CAP_IPC_LOCK")
    return Finding(
        "locked memory",
        Status.LIMITED,
        f"{soft >> 10} KiB: RDMA registers no more than this",
        "ulimit -l unlimited, or --ulimit memlock=-1 for a container",
    )


def _shared_memory() -> Finding:
    name = str(_SHARED_MEMORY)
    if not _SHARED_MEMORY.is_dir():
        return Finding(name, Status.FAILS, "is not there", "mount a tmpfs at /dev/shm")
    space = os.statvfs(_SHARED_MEMORY)
    total, free = space.f_blocks * space.f_frsize >> 20, space.f_bavail * space.f_frsize >> 20
    found = f"{free} of {total} MiB free"
    if total < _USUAL_CONTAINER_MIB * 2:
        return Finding(
            name,
            Status.LIMITED,
            f"{found}: engines talk through it",
            "--shm-size for a container, or mount -o remount,size=50% /dev/shm",
        )
    return Finding(name, Status.WORKS, found)


def _network_cards() -> Finding:
    cards = sorted(_RDMA_FOLDER.iterdir()) if _RDMA_FOLDER.is_dir() else []
    if not cards:
        return Finding(
            "RDMA",
            Status.LIMITED,
            "no device: mooncake and nixl use TCP between hosts",
            "expose /dev/infiniband to this container, if the host has cards",
        )
    ports = {f"{p.parent.parent.name}:{p.name}": p for c in cards for p in c.glob("ports/*")}
    said = {n: (p / "state").read_text().split(":")[-1].strip() for n, p in sorted(ports.items())}
    found = ", ".join(f"{name} {state}" for name, state in said.items())
    usable = [p for p in _VERBS_FOLDER.glob("uverbs*") if os.access(p, os.R_OK | os.W_OK)]
    if not usable:
        return Finding(
            "RDMA",
            Status.FAILS,
            f"{found}; no /dev/infiniband/uverbs* that this user may open",
            "expose /dev/infiniband to this container, and give this user read and write access",
        )
    if "ACTIVE" not in said.values():
        return Finding(
            "RDMA", Status.FAILS, f"{found}: no port is active", "see to cable, switch and ip link"
        )
    if any(state != "ACTIVE" for state in said.values()):
        return Finding(
            "RDMA", Status.LIMITED, found, "name the active ones as device of mooncake and nixl"
        )
    return Finding("RDMA", Status.WORKS, found)


def _allocator() -> Finding:
    if asked := expandable_segments():
        return Finding(
            "allocator",
            Status.FAILS,
            f"{asked}: such memory cannot be registered or shared",
            f"unset expandable_segments in {asked.partition('=')[0]} for engines",
        )
    return Finding("allocator", Status.WORKS, "no expandable segments asked for")


def _peer_access() -> Finding:
    name = "CUDA peer access"
    try:
        import torch
    except ImportError:
        return Finding(
            name, Status.LIMITED, "torch is not installed", "pip install 'windlass[torch]'"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return Finding(
            name, Status.LIMITED, f"torch {torch.__version__}, no CUDA device: no cuda_ipc"
        )
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


def _engines() -> list[Finding]:
    """Of the engines that this environment has, and of plugins that cannot be used."""
    findings, missing = [], []
    for name in ENGINES.names():
        try:
            releases = ENGINES.find(name).releases
        except ConfigError as error:
            findings.append(Finding(f"engine {name}", Status.FAILS, str(error), "pip uninstall it"))
            continue
        if releases is None:
            continue
        if version := installed_version(releases):
            findings.append(_engine(releases, version))
        else:
            missing.append(releases.name)
    if findings:
        return findings
    remedy = "pip install 'windlass[vllm]' or 'windlass[sglang]'; or --engine-python PATH, which looks into theirs"
    return [Finding(" and ".join(missing), Status.LIMITED, "not in this environment", remedy)]


def _engine(engine: EngineReleases, version: str) -> Finding:
    verdict = judge(engine, version, device_of(engine))
    if verdict.refused:
        remedy = f"install one of {', '.join(f'{engine.name} {r}' for r in engine.proven)}"
        return Finding(engine.name, Status.FAILS, verdict.refused, remedy)
    if verdict.warnings:
        remedy = "docs/capabilities.md says what each release has"
        return Finding(engine.name, Status.LIMITED, "; ".join(verdict.warnings), remedy)
    return Finding(engine.name, Status.WORKS, version)


def check_flags(command: str, checkpoint: Path | None = None) -> Finding:
    """Whether an engine may be started with these options.

    Args:
        command: name of the engine and its options, as in a shell: `vllm --enable-sleep-mode`.
        checkpoint: that the engine would serve; whether it may quantise depends on it.

    Raises:
        ConfigError: it names no engine, or a quotation does not end.
    """
    try:
        engine, *options = shlex.split(command) or [""]
    except ValueError as error:
        raise ConfigError(
            f"--engine-flags must be as in a shell: {error}, got {command!r}"
        ) from error
    if engine not in ENGINES.names():
        raise ConfigError(
            f"--engine-flags must begin with one of {list(ENGINES.names())}, got {command!r}"
        )
    name, rules = f"{engine} flags", ENGINES.find(engine).rules
    try:
        refuse_options(options, rules)
        if checkpoint is not None:
            require_followed(checkpoint, options)
    except ConfigError as error:
        return Finding(name, Status.FAILS, str(error), "leave it out")
    if checkpoint is None and any(o.startswith(("--quant", "-q")) for o in options):
        found = f"{' '.join(options)}: whether it may quantise depends on the checkpoint"
        return Finding(name, Status.LIMITED, found, "add --checkpoint DIR")
    return Finding(name, Status.WORKS, " ".join(options))


def _checkpoint(folder: Path) -> Finding:
    from windlass.engines.capture.codes import checkpoint_specs

    try:
        quantised = require_followed(folder, ())
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
        f"{len(specs)} tensors{' in block float8' if quantised else ''}; capture needs up to {elements * 8 >> 20} MiB per engine rank; tensors from which an engine computes others stay there a second time, in buffers",
    )
