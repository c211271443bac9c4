"""TLS of the control routes, from three environment variables that name PEM files.

WINDLASS_TLS_CERT and WINDLASS_TLS_KEY are this process's certificate, as a server and as a client.
WINDLASS_TLS_CA holds whom it believes; without it the system's authorities, and no client's certificate.

A process that has any of them speaks TLS alone: its servers take no plain connection, and it refuses
addresses that begin with `http://`. Files are read once.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import cache

from windlass.envs import (
    TLS_CA_VARIABLE,
    TLS_CERTIFICATE_VARIABLE,
    TLS_KEY_VARIABLE,
    environment_value,
)
from windlass.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Files:
    ca: str
    certificate: str
    key: str


def _files() -> _Files:
    files = _Files(
        environment_value(TLS_CA_VARIABLE),
        environment_value(TLS_CERTIFICATE_VARIABLE),
        environment_value(TLS_KEY_VARIABLE),
    )
    if bool(files.certificate) is not bool(files.key):
        raise ConfigError(
            f"{TLS_CERTIFICATE_VARIABLE} and {TLS_KEY_VARIABLE} must be set together, "
            f"got {files.certificate!r} and {files.key!r}"
        )
    return files


def is_tls_required() -> bool:
    """Whether this process speaks TLS alone.

    Raises:
        ConfigError: a certificate without its key, or the reverse.
    """
    return _files() != _Files("", "", "")


def server_context() -> ssl.SSLContext | None:
    """What a server of this process wraps connections in; None for plain ones.

    Clients may show a certificate; one that the authorities have not signed ends the connection.

    Raises:
        ConfigError: TLS is required and there is no certificate, or a file cannot be used.
    """
    if not is_tls_required():
        return None
    files = _files()
    if not files.certificate:
        raise ConfigError(
            f"{TLS_CERTIFICATE_VARIABLE} and {TLS_KEY_VARIABLE} must be set for a server where "
            f"{TLS_CA_VARIABLE} is, got ''"
        )
    return _server_context(files)


def client_context() -> ssl.SSLContext | None:
    """What a client of this process verifies servers with; None for the system's defaults.

    Raises:
        ConfigError: a file cannot be used.
    """
    return _client_context(_files()) if is_tls_required() else None


@cache
def _server_context(files: _Files) -> ssl.SSLContext:
    return _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files, ssl.CERT_OPTIONAL)


@cache
def _client_context(files: _Files) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks chain and host name
    if not files.ca:
        context.load_default_certs()
    return _load(context, files, ssl.CERT_REQUIRED)


def _load(context: ssl.SSLContext, files: _Files, verify: ssl.VerifyMode) -> ssl.SSLContext:
    try:
        if files.certificate:
            context.load_cert_chain(files.certificate, files.key)
        if files.ca:
            context.load_verify_locations(files.ca)
            context.verify_mode = verify
    except OSError as error:  # an ssl.SSLError is one
        raise ConfigError(
            f"{TLS_CA_VARIABLE}, {TLS_CERTIFICATE_VARIABLE} and {TLS_KEY_VARIABLE} must name PEM files "
            f"that belong together, got {files.ca!r}, {files.certificate!r}, {files.key!r}: {error}"
        ) from error
    return context
