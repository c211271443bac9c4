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


def test_expandable_segments_are_refused_with_the_variable_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    (finding,) = (f for f in run_checks() if f.name == "allocator")
    assert finding.status is Status.FAILS
    assert "PYTORCH_CUDA_ALLOC_CONF" in finding.remedy


def test_a_folder_without_safetensors_cannot_be_captured(tmp_path: Path) -> None:
    finding = run_checks(tmp_path)[-1]
    assert (finding.name, finding.status) == ("checkpoint", Status.FAILS)
    assert "safetensors" in finding.found
