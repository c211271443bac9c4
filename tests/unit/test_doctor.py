"""`windlass doctor` says what is there, and fails only for what was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from windlass.cli.checks import Status, run_checks
from windlass.cli.main import main


def test_a_required_check_that_does_not_work_is_the_exit_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor"]) == 0
    assert "ptrace scope" in capsys.readouterr().out
    assert main(["doctor", "--require", "no such check"]) == 1


def test_expandable_segments_and_a_folder_without_safetensors_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    findings = {finding.name: finding for finding in run_checks(tmp_path)}
    assert findings["allocator"].status is Status.FAILS
    assert "PYTORCH_CUDA_ALLOC_CONF" in findings["allocator"].remedy
    assert findings["checkpoint"].status is Status.FAILS
    assert "safetensors" in findings["checkpoint"].found
