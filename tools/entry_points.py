"""Write the entry points of this checkout to a folder, for a `src` on PYTHONPATH that is not installed."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write_entry_points(folder: Path, root: Path = ROOT) -> Path:
    """Write a `dist-info` with the entry points of `root`'s pyproject.toml. Add `folder` to the path, next to the sources."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [
        line
        for group, places in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{entry} = {place}" for entry, place in places.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder
