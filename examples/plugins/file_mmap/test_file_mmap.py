"""Conformance suite of transports, run on this transport."""

from __future__ import annotations

from typing import ClassVar

from windlass_file_mmap import FileMmapConfig

from windlass.testing import ProcessConformance


class TestFileMmap(ProcessConformance):
    config: ClassVar[FileMmapConfig] = FileMmapConfig()
