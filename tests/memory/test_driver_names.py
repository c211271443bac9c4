"""Names of the CUDA driver in the source, compared with the installed cuda-bindings. No GPU is needed."""

import re
from pathlib import Path

import pytest

driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings exist for Linux only")
SOURCE = Path(__file__).parents[2] / "src" / "windlass"
NAME = re.compile(r"(?:\"|driver\(\)\.|found\.)(cu[A-Z]\w+|CU[a-z_]\w+)\b")
OLD = {"cuDeviceGetUuid_v2"}
"""Names of cuda-bindings 12 only. The source asks whether they exist."""


def names() -> set[str]:
    """Return every name of the driver that a line of the source writes out."""
    texts = (path.read_text() for path in sorted(SOURCE.rglob("*.py")))
    found = {name for text in texts for name in NAME.findall(text)}
    return {name for name in found if not name.endswith("_")}


def test_the_source_names_functions_of_the_driver() -> None:
    assert {"cuInit", "cuDeviceGet", "cuMemGetInfo", "CUpointer_attribute"} <= names()


def test_cuda_bindings_have_every_name_that_the_source_uses() -> None:
    assert sorted(name for name in names() - OLD if not hasattr(driver, name)) == []
