"""Run one command in a virtual machine with real verbs, and return its exit status.

    python tools/rdma/guest.py --machine build/rdma -- make something

The guest sees this machine's files read-only (its writes stay in its memory). It runs the command as root in the same
directory, with a deadline. Exit status 124: the deadline passed; 125: the guest did not start, or ended without a
status. KVM is used only if a trial guest starts with it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

UP = b"GUEST_UP"
KVM_TRIAL_S = 15.0


def command_line(machine: Path, out: Path, args: argparse.Namespace, accel: str) -> list[str]:
    kvm = accel == "kvm"
    console = "console=ttyS0 quiet panic=-1 mitigations=off norandmaps random.trust_cpu=on"
    return [
        *("qemu-system-x86_64", "-accel", "kvm" if kvm else "tcg,thread=multi"),
        *("-cpu", "host" if kvm else "max", "-smp", str(args.cpus)),
        *("-machine", "q35", "-nographic", "-no-reboot", "-m", str(args.memory_mib)),
        *(["-nic", args.nic] if args.nic else ["-nic", "none"]),
        *("-kernel", str(machine / "vmlinuz"), "-initrd", str(machine / "initrd.gz")),
        *("-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"),
        *("-virtfs", f"local,path={out},mount_tag=out,security_model=none"),
        *("-append", console),
    ]


def boot(machine: Path, out: Path, args: argparse.Namespace, accel: str, limit_s: float) -> bool:
    """Run the guest, print its output, and return whether it ended by itself within the time."""
    (out / "status").unlink(missing_ok=True)
    process = subprocess.Popen(
        command_line(machine, out, args, accel),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
    )
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        process.kill()

    timer = threading.Timer(limit_s, expire)
    timer.start()
    assert process.stdout is not None
    for line in process.stdout:
        if UP in line:
            break
    while chunk := os.read(process.stdout.fileno(), 65536):  # unfinished lines too
        sys.stdout.buffer.write(chunk.replace(b"\r", b""))
        sys.stdout.buffer.flush()
    process.wait()
    timer.cancel()
    return not expired.is_set()


def kvm_works(machine: Path, args: argparse.Namespace) -> bool:
    """Return whether a trial guest starts with KVM. The trial has a deadline: nested virtualisation may hang."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    with tempfile.TemporaryDirectory(prefix="windlass-guest-") as out:
        Path(out, "command.sh").write_text("exit 0\n")
        return boot(machine, Path(out), args, "kvm", KVM_TRIAL_S) and Path(out, "status").exists()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", type=Path, required=True, help="from build_guest.sh")
    parser.add_argument("--deadline-s", type=float, default=900.0)
    parser.add_argument("--memory-mib", type=int, default=6144)
    parser.add_argument("--cpus", type=int, default=min(os.cpu_count() or 1, 4))
    parser.add_argument("--accel", choices=("auto", "kvm", "tcg"), default="auto")
    parser.add_argument("--nic", default="", help="qemu's -nic option; none by default")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    machine = args.machine.resolve()
    accel = args.accel
    if accel == "auto":
        accel = "kvm" if kvm_works(machine, args) else "tcg"
    print(f"guest: {accel}, {args.cpus} CPUs, {args.memory_mib} MiB", flush=True)
    with tempfile.TemporaryDirectory(prefix="windlass-guest-") as out:
        Path(out, "command.sh").write_text(
            "export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root\n"
            "ulimit -l unlimited; ulimit -n 65536\n"
            f"cd {shlex.quote(str(Path.cwd()))}\n{shlex.join(command)}\n"
        )
        if not boot(machine, Path(out), args, accel, args.deadline_s):
            print(f"guest: not over within {args.deadline_s:.0f} s", flush=True)
            return 124
        status = Path(out, "status")
        return int(status.read_text()) if status.exists() else 125


if __name__ == "__main__":
    sys.exit(main())
