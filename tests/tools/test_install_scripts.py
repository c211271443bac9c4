"""The scripts that install engines and frameworks update an environment whose list of packages has changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "tools/integrations"


def wheel(folder: Path, name: str, version: str) -> None:
    """Write a wheel of a package without modules."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")


def test_a_changed_list_of_packages_updates_the_environment(tmp_path: Path) -> None:
    tools, wheels, venv = tmp_path / "tools", tmp_path / "wheels", tmp_path / "venv"
    shutil.copytree(SCRIPTS, tools)
    wheels.mkdir()
    for name, version in (("areal", "1.0.4"), ("listed", "1"), ("listed", "2")):
        wheel(wheels, name, version)

    def installed(listed: str) -> str:
        """Run the script with this list, and return the installed version of the package in the list."""
        (tools / "areal-1.0.4.txt").write_text(listed)
        subprocess.run(
            ["bash", str(tools / "install_areal.sh"), str(venv), sys.prefix],
            env={**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)},
            check=True,
            timeout=300,
        )
        (found,) = venv.glob("lib/*/site-packages/listed-*.dist-info")
        return found.name

    assert installed("listed==1\n") == "listed-1.dist-info"
    assert installed("listed==2\n") == "listed-2.dist-info"
    # Without wheels, the script would fail if it ran pip again.
    shutil.rmtree(wheels)
    assert installed("listed==2\n") == "listed-2.dist-info"
