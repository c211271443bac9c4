"""Certificates of a temporary authority, as environment variables for the processes of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import final

import trustme

from windlass.envs import temporary_values

__all__ = ["Authority"]


@final
class Authority:
    """Authority that signs certificates. A certificate is a set of environment variables that name
    files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._ca, self._count = folder, trustme.CA(), 0
        self.file = folder / f"authority-{id(self)}.pem"
        self._ca.cert_pem.write_to_path(self.file)

    def issue(
        self,
        *roles: str,
        host: str = "127.0.0.1",
        believes: Authority | None = None,
        expired: bool = False,
    ) -> dict[str, str]:
        """Issue a certificate for `host` with these roles, to a process that trusts the authority
        `believes`."""
        units = [f"windlass-{role}" for role in roles]
        certificate = self._ca.issue_cert(
            host,
            organization_unit_name=units[0] if units else None,
            not_after=datetime.now(UTC) - timedelta(days=1) if expired else None,
            not_before=datetime.now(UTC) - timedelta(days=9) if expired else None,
        )
        self._count += 1
        paths = [
            self._folder / f"{self.file.stem}-{self._count}-{part}" for part in ("cert", "key")
        ]
        certificate.private_key_pem.write_to_path(paths[1])
        for blob in certificate.cert_chain_pems:
            blob.write_to_path(paths[0], append=True)
        return {
            "WINDLASS_TLS_CA": str((believes or self).file),
            "WINDLASS_TLS_CERT": str(paths[0]),
            "WINDLASS_TLS_KEY": str(paths[1]),
        }

    @contextmanager
    def here(self, *roles: str) -> Iterator[None]:
        """Give this process such a certificate inside the block."""
        with temporary_values(self.issue(*roles)):
            yield
