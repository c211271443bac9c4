"""Warnings about the release of an engine before the engine starts."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from windlass.engines.sglang.spec import RELEASES as SGLANG
from windlass.engines.versions import (
    EngineReleases,
    check_installed,
    device_of,
    installed_version,
    warnings_of,
)
from windlass.engines.vllm.spec import RELEASES as VLLM
from windlass.errors import ConfigError


@pytest.mark.parametrize(
    ("engine", "version", "says"),
    [
        (SGLANG, "0.5.10", "must be 0.5.11 or later, got 0.5.10, which has no plugins (entry"),
        (SGLANG, "0.5.10.post1", "must be 0.5.11 or later"),
        (SGLANG, "0.5.5", "must be 0.5.11 or later, got 0.5.5, which has no plugins"),
        (SGLANG, "0.4.9", "must be 0.5.11 or later"),
        (VLLM, "0.23.1", "must be 0.24 or later, got 0.23.1: older releases were not checked"),
    ],
)
def test_a_release_without_a_required_feature_is_refused(
    engine: EngineReleases, version: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        warnings_of(engine, version)


@pytest.mark.parametrize(
    ("engine", "version", "says"),
    [
        (SGLANG, "0.5.23", []),
        (SGLANG, "0.5.23.post1", []),
        (
            SGLANG,
            "0.5.21",
            ["`--dp` is refused", "were never tested; tested releases: 0.5.16, 0.5.23"],
        ),
        (
            SGLANG,
            "0.5.16",
            [
                "no weight version per token: all tokens",
                "`--hicache-storage-backend` is refused",
                "`--dp` is refused",
            ],
        ),
        (
            SGLANG,
            "0.5.11",
            [
                "no weight version per token",
                "`--hicache-storage-backend` is refused",
                "`--dp` is refused",
                "were never tested",
            ],
        ),
        (SGLANG, "0.0.0.dev0", ["is no release"]),
        (SGLANG, "unknown", ["is no release"]),
        (VLLM, "0.32.0", []),
        (VLLM, "0.32.0+cpu", []),
        (VLLM, "0.24.0", ["no `/update_weight_version`", "no `--enable-scale-out`"]),
        (VLLM, "0.24.1rc2", ["no `/update_weight_version`", "no `--enable-scale-out`"]),
        (VLLM, "0.28.0", ["were never tested; tested releases: 0.24, 0.32"]),
        (VLLM, "1.0", ["were never tested"]),
    ],
)
def test_a_supported_release_warns_of_its_missing_features(
    engine: EngineReleases, version: str, says: list[str]
) -> None:
    warnings = warnings_of(engine, version)
    assert len(warnings) == len(says)
    for warning, part in zip(warnings, says, strict=True):
        assert part in warning


@pytest.mark.parametrize(
    ("version", "device", "says"),
    [
        ("0.32.1", "GPUs", "vLLM 0.32.1: updates of this release were tested on CPUs, never on GPUs; releases tested on GPUs: 0.24"),
        ("0.32.1", "CPUs", ""),
        ("0.32.1", "", ""),
        ("0.24.0", "CPUs", "on GPUs, never on CPUs; releases tested on CPUs: 0.32"),
        ("0.24.0", "GPUs", ""),
    ],
)  # fmt: skip
def test_a_release_never_tested_on_this_device_gives_a_warning(
    version: str, device: str, says: str
) -> None:
    of_device = [w for w in warnings_of(VLLM, version, device) if "never on" in w]
    assert len(of_device) == bool(says)
    assert not says or says in of_device[0]


@pytest.mark.parametrize("engine", [SGLANG, VLLM], ids=str)
def test_the_table_of_releases_is_consistent(engine: EngineReleases) -> None:
    assert all(older < newer for older, newer in itertools.pairwise(engine.read))
    assert engine.run.keys() <= set(engine.read)
    for feature in engine.features:
        assert feature.missing_in < feature.since
        assert feature.without or not feature.needed
        assert not feature.needed or feature.since <= engine.read[0]


def test_the_installed_release_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = EngineReleases("Old", "old_engine", ("old-engine",), ((3, 1),), {(3, 1): "CPUs"}, ())
    with pytest.raises(ConfigError, match="Old must be installed in the environment of"):
        check_installed(old)
    (tmp_path / "old_engine").mkdir()
    (tmp_path / "old_engine" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed_version(old) == "unknown"
    assert "is no release" in check_installed(old)[0]
    metadata = tmp_path / "old_engine-3.1.4.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: old-engine\nVersion: 3.1.4\n")
    assert installed_version(old) == "3.1.4"
    says = () if device_of(old) == "CPUs" else ("never on GPUs",)
    assert [part in w for w, part in zip(check_installed(old), says, strict=True)] == [True] * len(
        says
    )
    metadata.write_text("Metadata-Version: 2.1\nName: old-engine\nVersion: 3.0\n")
    with pytest.raises(ConfigError, match=r"must be 3\.1 or later, got 3\.0"):
        check_installed(old)
