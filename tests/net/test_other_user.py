"""Another user of the host learns no more of a running controller than the network shows."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from child_process import running
from fake_fleet import TOKEN

NOBODY = 65534
TRY = """
import ctypes, encodings.idna, os, sys, urllib.error, urllib.request
pid, journal, url, uid = sys.argv[1:]
os.setgroups([]), os.setgid(int(uid)), os.setuid(int(uid))
for path in (f"/proc/{pid}/environ", f"/proc/{pid}/mem", f"/proc/{pid}/maps", journal):
    try:
        open(path, "rb").read()
        print("read", path)
    except PermissionError:
        pass
try:
    os.kill(int(pid), 9)
    print("killed")
except PermissionError:
    pass
libc = ctypes.CDLL(None, use_errno=True)
if libc.ptrace(16, int(pid), 0, 0) == 0:  # PTRACE_ATTACH
    print("traced")
try:
    urllib.request.urlopen(url + "/v1/status", timeout=20)
    print("answered")
except urllib.error.HTTPError as error:
    print(error.code)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root plays two users")
def test_another_user_of_the_host_reads_no_token_no_journal_and_no_memory() -> None:
    # Folders of pytest are closed to other users.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        journal = str(Path(folder) / "journal")
        serve = ("-m", "windlass.cli.main", "serve", "--journal", journal)
        with running(*serve, token=TOKEN) as process:
            assert process.stdout is not None
            url = process.stdout.readline().decode().strip()
            done = subprocess.run(
                (sys.executable, "-c", TRY, str(process.pid), journal, url, str(NOBODY)),
                cwd="/",
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert (done.stdout, done.stderr) == ("401\n", "")
            assert process.poll() is None
