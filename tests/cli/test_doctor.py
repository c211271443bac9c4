"""`windlass doctor` reports what works here, and fails only for checks that were requested."""

from __future__ import annotations

import json
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from windlass.cli import checks
from windlass.cli.checks import Status, check_flags, check_transports, run_checks
from windlass.cli.frameworks import check_entry_points
from windlass.cli.main import main
from windlass.transports import CmaConfig, create_transport, parse_transport

ROOT = Path(__file__).resolve().parents[2]


def test_a_failed_required_check_sets_the_exit_status_of_doctor(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor"]) == 0
    assert "ptrace scope" in capsys.readouterr().out
    assert main(["doctor", "--require", "no such check"]) == 1
    assert "--require no such check: must be one of ['/dev/shm', " in capsys.readouterr().err
    assert main(["doctor", "--engine-flags", "vllm 'a"]) == 2
    assert 'as in a shell, got "vllm \'a": No closing quotation' in capsys.readouterr().err


def test_doctor_limits_expandable_segments_and_refuses_a_folder_without_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    findings = {finding.name: finding for finding in run_checks(tmp_path)}
    assert findings["allocator"].status is Status.LIMITED
    assert "PYTORCH_CUDA_ALLOC_CONF" in findings["allocator"].remedy
    assert findings["checkpoint"].status is Status.FAILS
    assert "safetensors" in findings["checkpoint"].found


def test_doctor_names_the_unsupported_scheme_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    (finding,) = (f for f in run_checks(tmp_path) if f.name == "checkpoint")
    assert finding.status is Status.FAILS
    assert "int4_grouped" in finding.found


def test_doctor_prints_brackets_unchanged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "[extra]expandable_segments:True")
    assert main(["doctor"]) == 0
    assert "[extra]" in capsys.readouterr().out


def test_every_failed_finding_of_doctor_gives_a_remedy() -> None:
    findings = run_checks()
    assert {"cma", "shm", "mooncake", "/dev/shm", "locked memory", "RDMA"} <= {
        finding.name for finding in findings
    }
    # A machine without a GPU needs no remedy.
    nothing_to_mend = {"CUDA peer access"}
    for finding in findings:
        silent = finding.status is Status.WORKS or finding.name in nothing_to_mend
        assert silent or finding.remedy, finding


@pytest.mark.parametrize("is_automatic", [True, False])
def test_doctor_names_the_fastest_transport_that_auto_starts(
    is_automatic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CmaConfig, "is_automatic", is_automatic)
    transport = create_transport(parse_transport("auto"), towards="http://127.0.0.1:8000")
    fastest = transport.offers()[0].transport
    transport.close()
    (found,) = (finding for finding in run_checks() if finding.name == "auto, host memory")
    assert found.found.startswith(f"within this host {fastest};")


def test_doctor_names_the_transport_of_gpu_memory_between_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The transports between hosts were started for host memory only, so doctor named none for GPU memory."""
    monkeypatch.setattr(checks, "count_gpus", lambda: 1)
    (found,) = (finding for finding in check_transports() if finding.name == "auto, cuda memory")
    assert found.found.endswith(("between hosts mooncake", "between hosts nixl"))


@pytest.mark.parametrize(
    ("state", "device", "status"),
    [
        ("4: ACTIVE", True, Status.WORKS),
        ("1: DOWN", True, Status.FAILS),
        ("4: ACTIVE", False, Status.FAILS),
    ],
)
def test_a_network_card_must_be_up_and_open_to_this_user(
    state: str, device: bool, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = tmp_path / "class" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (tmp_path / "verbs").mkdir()
    if device:
        (tmp_path / "verbs" / "uverbs0").touch()
    monkeypatch.setattr(checks, "RDMA_FOLDER", tmp_path / "class")
    monkeypatch.setattr(checks, "VERBS_FOLDER", tmp_path / "verbs")
    (found,) = (finding for finding in run_checks() if finding.name == "RDMA")
    assert found.status is status
    assert found.found.startswith(f"mlx5_0:1 {state.split()[-1]}")


def test_doctor_names_refused_engine_options_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_flags("vllm --max-model-len 99").status is Status.WORKS
    refused = check_flags("vllm --max-model-len 99 --enable-sleep-mode")
    assert refused.status is Status.FAILS
    assert "use the transport pull" in refused.found
    taking_turns = "vllm --enable-sleep-mode --transport"
    assert check_flags(f"{taking_turns} pull").status is Status.WORKS
    assert check_flags(f"""{taking_turns} '{{"type": "pull"}}'""").status is Status.WORKS
    assert check_flags(f"{taking_turns} cuda_ipc").status is Status.FAILS
    assert check_flags("sglang --enable-memory-saver").status is Status.FAILS
    assert check_flags("vllm --logprobs-mode processed_logprobs").status is Status.WORKS
    assert (
        "distribution that tokens are sampled from"
        in check_flags("vllm --logprobs-mode raw_logprobs").found
    )
    drafts = """vllm --speculative-config '{"method": "eagle3", "model": "drafts"}'"""
    assert check_flags(drafts).status is Status.WORKS
    stores = """vllm --kv-transfer-config '{"kv_connector": "%s", "kv_role": "kv_both"}'"""
    assert check_flags(stores % "OffloadingConnector").status is Status.WORKS
    assert "--kv-transfer-config must have the kv_connector OffloadingConnector" in (
        other := check_flags(stores % "ExampleConnector").found
    )
    assert "got 'ExampleConnector'" in other
    assert "--dp must be 1 with --nnodes 2" in check_flags("vllm --dp 2 --nnodes 2").found
    attention = "sglang --tp 4 --dp 4 --enable-dp-attention --nnodes 2"
    assert check_flags(attention).status is Status.WORKS
    assert check_flags("vllm --quantization fp8").status is Status.LIMITED
    assert check_flags("vllm --quantization fp8", tmp_path).status is Status.FAILS
    assert main(["doctor", "--engine-flags", "nothing"]) == 2
    assert "--engine-flags must begin with one of" in capsys.readouterr().err


def test_doctor_looks_for_an_engine_with_its_own_interpreter(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = tmp_path / "vllm-0.24.0.dist-info"
    engine.mkdir()
    (engine / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.24.0\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}:$PYTHONPATH exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho No module named windlass >&2\nexit 1\n")
    broken.chmod(0o755)
    paths = [str(python), str(broken), str(tmp_path / "nowhere")]
    options = [word for path in paths for word in ("--engine-python", path)]
    assert main(["doctor", "--json", *options]) == 0
    report = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert list(report) == [sys.executable, *paths]
    there, without_windlass, nowhere = (report[path] for path in paths)
    (found,) = (finding for finding in there if finding["name"] == "vLLM")
    assert found["status"] == "limited"
    assert "no `/update_weight_version`" in found["found"]
    assert "No module named windlass" in without_windlass[0]["found"]
    assert nowhere[0]["status"] == "fails"


@pytest.mark.parametrize(
    ("num_gpus", "release", "extra"),
    [(0, "12.8", ""), (2, "12.8", "mooncake-cuda12"), (2, "13.0", "mooncake-cuda13"), (1, None, "mooncake-cuda13")],
)  # fmt: skip
def test_doctor_offers_mooncake_for_gpu_memory(
    num_gpus: int, release: str | None, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "count_gpus", lambda: num_gpus)
    monkeypatch.setattr(torch.version, "cuda", release)
    try:
        version("mooncake-transfer-engine-non-cuda")
    except PackageNotFoundError as error:
        pytest.skip(f"not installed: {error}")
    (finding,) = (f for f in checks.check_transports() if f.name == "mooncake")
    if not extra:
        assert (finding.status, finding.remedy) == (Status.WORKS, "")
        return
    assert finding.status is Status.LIMITED
    assert "cannot send GPU memory" in finding.found
    assert f"pip install '.[{extra}]'" in finding.remedy
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = declared["optional-dependencies"][extra]
    assert "non-cuda" not in wanted


def test_a_missing_framework_sets_the_exit_status_of_doctor(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """These tests run without verl. test_verl.py checks an environment that has it."""
    assert main(["doctor", "--framework", "verl", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    found = {finding["name"]: finding for finding in report[sys.executable]}
    assert found["verl"]["status"] == "fails"
    assert found["verl"]["remedy"]
    assert found["torch"]["status"] == "works"
    with pytest.raises(SystemExit):
        main(["doctor", "--framework", "nosuch"])
    assert "choose from" in capsys.readouterr().err


def test_doctor_reports_whether_an_installed_engine_finds_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_entry_points() == ()
    add_distribution(tmp_path, "vllm")
    monkeypatch.syspath_prepend(str(tmp_path))
    (finding,) = check_entry_points()
    assert (finding.name, finding.status) == ("vllm.general_plugins", Status.WORKS)
    assert "windlass.integrations.vllm.plugin" in finding.found
    assert check_entry_points(but="vllm") == ()
    monkeypatch.setenv("VLLM_PLUGINS", "lora, other")
    (finding,) = check_entry_points()
    assert finding.status is Status.FAILS
    assert "VLLM_PLUGINS must contain windlass, got 'lora, other'" in finding.found
    monkeypatch.setenv("VLLM_PLUGINS", "other, windlass")
    (finding,) = check_entry_points()
    assert finding.status is Status.WORKS


def test_doctor_says_that_an_engine_cannot_find_a_plugin_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then only Windlass's code is on the path, as with `PYTHONPATH=src`."""
    add_distribution(tmp_path, "sglang")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (finding,) = check_entry_points()
    assert (finding.name, finding.status) == ("sglang.srt.plugins", Status.LIMITED)
    assert "the package is not installed" in finding.found
    assert "pip install" in finding.remedy


def add_distribution(folder: Path, name: str) -> None:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
