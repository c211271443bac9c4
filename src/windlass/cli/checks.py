"""The checks of `windlass doctor`. Each check examines one property of the environment and changes nothing."""

from __future__ import annotations

import os
import resource
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib import metadata
from itertools import permutations
from pathlib import Path

import windlass
from windlass.engines.launch import checked_arguments
from windlass.engines.options import refuse_options
from windlass.engines.quantised import require_followed
from windlass.engines.sglang.spec import ORIGINAL
from windlass.engines.spec import ENGINES, expandable_segments
from windlass.engines.versions import EngineReleases, device_of, installed_version, warnings_of
from windlass.envs import environment_value
from windlass.errors import ConfigError, WindlassError
from windlass.memory.cuda.driver import count_gpus
from windlass.transports.base import TransportOffer
from windlass.transports.choice import choose_transport
from windlass.transports.mooncake.native import WITHOUT_CUDA, is_installed
from windlass.transports.network import locks_without_limit
from windlass.transports.registry import (
    TransportConfig,
    config_type,
    transport_names,
)
from windlass.transports.traits import MemoryType
from windlass.wording import install_command

RDMA_FOLDER = Path("/sys/class/infiniband")
"""Folder in which the kernel lists the network cards with RDMA."""
VERBS_FOLDER = Path("/dev/infiniband")
"""Folder of the device files through which a process uses a network card with RDMA."""
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, not written
_USUAL_CONTAINER_MIB = 64
"""Default size of /dev/shm in a Docker container."""


STDERR = 2
PACKAGE = "windlass"
DISTRIBUTION = "windlass-rl"
"""Name of the distribution of Windlass."""
OTHER_PROJECT = "windlass"
"""Name of another project's distribution on PyPI."""
SUMMARY = "One-sided, verified, transactional weight updates and asynchronous rollouts for RL post-training"
"""Summary in Windlass's metadata. A distribution `windlass` with this summary is an old release of Windlass."""


class Status(StrEnum):
    """Result of a check: the property works, works with a limit, or fails."""

    WORKS = "works"
    LIMITED = "limited"
    FAILS = "fails"


WORKS, LIMITED, FAILS = Status


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `remedy` is empty if the user has nothing to change."""

    name: str
    status: Status
    found: str
    remedy: str = ""


def run_checks(checkpoint: Path | None = None) -> tuple[Finding, ...]:
    """Run all checks and return the findings in the order of the report.

    Args:
        checkpoint: folder of a checkpoint. If given, also check that Windlass can capture the layout of engines that
            serve the checkpoint.
    """
    findings = [
        check_package(),
        *check_transports(),
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


def check_package() -> Finding:
    """Report Windlass's version and folder, and whether a distribution called `windlass` is installed too.

    Such a distribution is another project or an old release of Windlass, and its files overwrite Windlass's files.
    """
    found = f"{windlass.__version__} in {Path(windlass.__file__).parent}"
    for other in metadata.distributions(name=OTHER_PROJECT):
        remedy = (
            f"{sys.executable} -m pip uninstall {OTHER_PROJECT}, then install again: "
            f"{install_command(python=sys.executable)}"
        )
        if other.metadata["Summary"] == SUMMARY:
            found = f"{found}; an old release named {OTHER_PROJECT} is installed as well"
            return Finding(PACKAGE, LIMITED, found, remedy)
        return Finding(PACKAGE, FAILS, f"{found}; {of_other_project(other.version)}", remedy)
    return Finding(PACKAGE, WORKS, found)


def of_other_project(version: str) -> str:
    """Return the message for a user who has installed another project's package `windlass`, in release `version`."""
    return (
        f"the package {OTHER_PROJECT} {version} of another project is installed here; it has the same import name and "
        f"command as Windlass, whose package on PyPI is {DISTRIBUTION}"
    )


def check_transports() -> list[Finding]:
    """Start and close each registered transport, and report the results. Then report what `auto` would choose.

    A transport that needs a GPU is left out if this host has no GPU. If this host has a GPU, start each
    automatic transport that supports host and GPU memory once more, for GPU 0, as `auto` does for weights on this GPU.
    """
    findings, offers = [], list[TransportOffer]()
    for name in transport_names():
        try:
            kind = config_type(name)
        except WindlassError as error:
            findings.append(Finding(name, FAILS, str(error), "repair or remove its package"))
            continue
        needs_gpu = MemoryType.HOST not in kind.memory
        # `_automatic` reports `auto`, which chooses among the other transports.
        if name == "auto" or (needs_gpu and count_gpus() == 0):
            continue
        finding, found = _start(kind())
        findings.append(_of_mooncake(finding) if name == "mooncake" else finding)
        if kind.is_automatic:
            offers += found
            if not needs_gpu and MemoryType.CUDA in kind.memory and count_gpus() > 0:
                offers += _start(kind(), gpu=0)[1]
    return [*findings, *_automatic(offers)]


def _start(config: TransportConfig, gpu: int = -1) -> tuple[Finding, tuple[TransportOffer, ...]]:
    """Start and close a transport; return the finding about it, and its offers. `gpu`: see `TransportConfig.create`."""
    try:
        with _quiet_libraries():
            transport = config.create(gpu=gpu)
            try:
                report, traits, offers = transport.report(), transport.traits, transport.offers()
            finally:
                transport.close()
    except WindlassError as error:
        return Finding(config.name, FAILS, str(error), config.remedy), ()
    reach = "processes of this host" if traits.same_host else "other hosts too"
    one_sided = "" if traits.one_sided else "; the receiver must take part in each write"
    found = f"{report.protocol}, {report.detail}; reaches {reach}{one_sided}"
    return Finding(config.name, WORKS, found), offers


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Discard output to stderr inside the block, because Mooncake logs an error whenever it starts."""
    sys.stderr.flush()
    kept = os.dup(STDERR)
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), STDERR)
        yield
    finally:
        os.dup2(kept, STDERR)
        os.close(kept)


def _automatic(offers: Sequence[TransportOffer]) -> list[Finding]:
    """Report which transport `auto` would choose within this host and between hosts.

    Return one finding for each kind of memory for which there is an offer.
    """
    findings = []
    for kind in MemoryType:
        here = [offer for offer in offers if offer.traits.memory is kind]
        if any(offer.traits.same_host and not offer.traits.allocates for offer in here):
            # Like `AutoConfig`: if a transport within one host can expose existing memory, leave out the transports that
            # expose only memory of their own allocator.
            here = [offer for offer in here if not offer.traits.allocates]
        said = []
        for where, same_host in (("within this host", True), ("between hosts", False)):
            try:
                choice = choose_transport(here, here, same_host=same_host, same_address=True)
            except ConfigError:
                said.append(f"{where} none")
            else:
                said.append(f"{where} {choice.transport}")
        if here:
            findings.append(Finding(f"auto, {kind} memory", WORKS, "; ".join(said)))
    return findings


def _of_mooncake(finding: Finding) -> Finding:
    """Return the finding about Mooncake. If Mooncake fails, the remedy is to install the right wheel for this host.

    On a host with GPUs, the right wheel is the wheel for torch's CUDA release. If such a host has the wheel without
    CUDA, the finding's status is LIMITED.
    """
    extra = "mooncake"
    if count_gpus():
        try:
            import torch
        except ImportError:
            release = ""
        else:
            release = torch.version.cuda or ""
        extra = "mooncake-cuda12" if release.startswith("12.") else "mooncake-cuda13"
    install = f"{install_command(extra)}, and the package libibverbs1"
    if finding.status is FAILS:
        return replace(finding, remedy=install)
    if extra != "mooncake" and is_installed(WITHOUT_CUDA):
        found = f"{finding.found}; {WITHOUT_CUDA} cannot send GPU memory, and this host has GPUs"
        return Finding(finding.name, LIMITED, found, f"pip uninstall {WITHOUT_CUDA}; {install}")
    return finding


def _ptrace() -> Finding:
    name = "ptrace scope"
    if not _PTRACE_SCOPE.exists():
        return Finding(
            name, WORKS, "no Yama: a process may write to other processes of the same user"
        )
    scope = _PTRACE_SCOPE.read_text().strip()
    if scope == "0":
        return Finding(name, WORKS, "0")
    remedy = "sysctl kernel.yama.ptrace_scope=0, add CAP_SYS_PTRACE, or use shm"
    return Finding(name, LIMITED, f"{scope}: cma needs CAP_SYS_PTRACE", remedy)


def _locked_memory() -> Finding:
    name, (soft, _) = "locked memory", resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding(name, WORKS, "unlimited")
    if locks_without_limit():
        return Finding(name, WORKS, "unlimited, by CAP_IPC_LOCK")
    remedy = "ulimit -l unlimited, or --ulimit memlock=-1 for a container"
    return Finding(name, LIMITED, f"RDMA can register at most {soft >> 10} KiB", remedy)


def _shared_memory() -> Finding:
    name = str(_SHARED_MEMORY)
    if not _SHARED_MEMORY.is_dir():
        return Finding(name, FAILS, "does not exist", "mount a tmpfs at /dev/shm")
    space = os.statvfs(_SHARED_MEMORY)
    total, free = space.f_blocks * space.f_frsize >> 20, space.f_bavail * space.f_frsize >> 20
    found = f"{free} of {total} MiB free"
    if total < _USUAL_CONTAINER_MIB * 2:
        remedy = "--shm-size for a container, or mount -o remount,size=50% /dev/shm"
        return Finding(name, LIMITED, f"{found}: the processes of an engine need more", remedy)
    return Finding(name, WORKS, found)


def _network_cards() -> Finding:
    cards = sorted(RDMA_FOLDER.iterdir()) if RDMA_FOLDER.is_dir() else []
    ports = {f"{p.parent.parent.name}:{p.name}": p for c in cards for p in c.glob("ports/*")}
    said = {n: (p / "state").read_text().split(":")[-1].strip() for n, p in sorted(ports.items())}
    status, found, remedy = WORKS, ", ".join(f"{name} {state}" for name, state in said.items()), ""
    if not cards:
        status, found = LIMITED, "no device: mooncake and nixl use TCP between hosts"
        remedy = "expose /dev/infiniband to this container, if the host has cards"
    elif not any(os.access(p, os.R_OK | os.W_OK) for p in VERBS_FOLDER.glob("uverbs*")):
        status, found = FAILS, f"{found}; this user cannot open any /dev/infiniband/uverbs*"
        remedy = (
            "expose /dev/infiniband to this container, and give this user read and write access"
        )
    elif "ACTIVE" not in said.values():
        status, found = FAILS, f"{found}: no port is active"
        remedy = "check the cable, the switch and `ip link`"
    elif any(state != "ACTIVE" for state in said.values()):
        status, remedy = LIMITED, "set `device` of mooncake and nixl to devices with an active port"
    return Finding("RDMA", status, found, remedy)


def _allocator() -> Finding:
    asked = expandable_segments()
    if not asked:
        return Finding("allocator", WORKS, "expandable segments are not enabled")
    remedy = f"unset expandable_segments in {asked.partition('=')[0]} for nixl and mooncake"
    found = f"{asked}: works with cuda_ipc and pull; a NIC cannot register memory of expandable segments"
    return Finding("allocator", LIMITED, found, remedy)


def _peer_access() -> Finding:
    name = "CUDA peer access"
    try:
        import torch
    except ImportError:
        return Finding(name, LIMITED, "torch is not installed", install_command("torch"))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return Finding(
            name, LIMITED, f"torch {torch.__version__} finds no CUDA device, which cuda_ipc needs"
        )
    blocked = [
        f"{a}-{b}"
        for a, b in permutations(range(count), 2)
        if not torch.cuda.can_device_access_peer(a, b)
    ]
    if not blocked:
        return Finding(name, WORKS, f"{count} CUDA devices; each can access every other")
    found = f"{count} CUDA devices; no peer access between {', '.join(blocked)}"
    remedy = "disable ACS, or keep trainer and engine ranks on connected devices"
    return Finding(name, LIMITED, found, remedy)


def _engines() -> list[Finding]:
    """Report the engines in this environment, and engine plugins that cannot be imported."""
    findings, missing = [], []
    for name in ENGINES.names():
        try:
            releases = ENGINES.find(name).releases
        except ConfigError as error:
            findings.append(Finding(f"engine {name}", FAILS, str(error), "uninstall its package"))
            continue
        if releases is None:
            continue
        if version := installed_version(releases):
            findings += [_engine(releases, version), _logprobs(releases)]
        else:
            missing.append(releases.name)
    if findings:
        return findings
    install = (
        f"{install_command('vllm')}, or '.[sglang]'"
        if count_gpus()
        else "docs/integrations/vllm.md says how to install vLLM for CPUs"
    )
    remedy = f"{install}; or --engine-python PATH for another environment"
    return [Finding(" and ".join(missing), LIMITED, "not in this environment", remedy)]


def _engine(engine: EngineReleases, version: str) -> Finding:
    try:
        warnings = warnings_of(engine, version, device_of(engine))
    except ConfigError as error:
        remedy = f"install one of {', '.join(f'{engine.name} {r}' for r in engine.proven)}"
        return Finding(engine.name, FAILS, str(error), remedy)
    if warnings:
        remedy = "docs/capabilities.md says what works with each release"
        return Finding(engine.name, LIMITED, "; ".join(warnings), remedy)
    return Finding(engine.name, WORKS, version)


def _logprobs(engine: EngineReleases) -> Finding:
    name = f"{engine.name} log-probabilities"
    if engine.name == "SGLang" and environment_value(ORIGINAL):
        found = f"{ORIGINAL} is set, so SGLang ignores temperature, top_k and top_p in log-probabilities"
        return Finding(name, FAILS, found, f"unset {ORIGINAL}")
    found = "computed by default from the sampled distribution, after temperature, top_k and top_p"
    return Finding(name, WORKS, found)


def check_flags(command: str, checkpoint: Path | None = None) -> Finding:
    """Report whether Windlass can update an engine that is started with these options.

    Args:
        command: name of the engine and its options, as in a shell: `vllm --enable-sleep-mode`.
        checkpoint: folder of the checkpoint that the engine would serve. Without a checkpoint, options for
            quantisation cannot be checked.

    Raises:
        ConfigError: `command` does not start with the name of an engine, or lacks a closing quotation mark.
    """
    try:
        engine, *options = shlex.split(command) or [""]
    except ValueError as error:
        raise ConfigError(
            f"--engine-flags must be quoted as in a shell, got {command!r}: {error}"
        ) from error
    if engine not in ENGINES.names():
        raise ConfigError(
            f"--engine-flags must begin with one of {list(ENGINES.names())}, got {command!r}"
        )
    name, said = f"{engine} flags", " ".join(options)
    try:
        spec = ENGINES.find(engine)
        if spec.server is None:
            refuse_options(options, spec.rules)
        else:
            checked_arguments(spec, ["--name", "engine", "--model", str(checkpoint), *options])
        if checkpoint is not None:
            require_followed(checkpoint, options)
    except ConfigError as error:
        return Finding(name, FAILS, str(error), "leave this option out")
    if checkpoint is None and any(o.startswith(("--quant", "-q")) for o in options):
        found = f"{said}: whether the engine may quantise depends on the checkpoint"
        return Finding(name, LIMITED, found, "add --checkpoint DIR")
    return Finding(name, WORKS, said)


def _checkpoint(folder: Path) -> Finding:
    from windlass.engines.capture.checkpoint import checkpoint_specs

    try:
        quantised = require_followed(folder, ())
        specs = checkpoint_specs(folder)
    except WindlassError as error:
        remedy = "use a checkpoint in bfloat16, or in block float8 (docs/engines.md)"
        return Finding("checkpoint", FAILS, str(error), remedy)
    nbytes = 8 * sum(spec.numel for spec in specs)
    found = (
        f"{len(specs)} tensors{' in block float8' if quantised else ''}; the capture of an "
        f"engine's layout needs up to {nbytes >> 20} MiB per rank; after the capture, each rank still holds copies of the "
        "tensors from which the engine computes other tensors"
    )
    return Finding("checkpoint", WORKS, found)
