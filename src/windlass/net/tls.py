"""TLS of the control routes, from three environment variables that name PEM files.

WINDLASS_TLS_CERT and WINDLASS_TLS_KEY name the certificate of this process and its key, for servers
and clients. WINDLASS_TLS_CA names the certificate authorities that this process trusts. If
WINDLASS_TLS_CA is not set, the process trusts the system's authorities and accepts no client certificate.

If any of these variables is set, the process uses TLS only: its servers accept no plain connection,
and its clients refuse addresses that begin with `http://`. A client does not send its token to a
controller whose certificate names another role than `owner`. The files are read once.
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
from windlass.net.access import Access, Certificate, role_of_certificate


@dataclass(frozen=True, slots=True)
class _Files:
    """Paths from the three environment variables; empty for a variable that is not set."""

    ca: str
    certificate: str
    key: str


def _files() -> _Files:
    """Return the paths from the environment variables; raise ConfigError if only one of certificate and key is set."""
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
    """Return whether all connections of this process use TLS.

    They do if at least one of the three environment variables (authority, certificate, key) is set.

    Raises:
        ConfigError: only one of certificate and key is set.
    """
    return _files() != _Files("", "", "")


def server_context() -> ssl.SSLContext | None:
    """Return the TLS context for servers of this process; None for plain connections.

    A client may send a certificate. The connection ends if no trusted authority has signed this certificate.

    Raises:
        ConfigError: TLS is required but the certificate is missing, or a file cannot be used.
    """
    if not is_tls_required():
        return None
    files = _files()
    if not files.certificate:
        raise ConfigError(
            f"{TLS_CERTIFICATE_VARIABLE} must be set for a server if {TLS_CA_VARIABLE} is set, got ''; also set "
            f"{TLS_KEY_VARIABLE}"
        )
    return _server_context(files)


def client_context(*, to_controller: bool) -> ssl.SSLContext | None:
    """Return the TLS context for clients of this process; None for the system's defaults, if TLS is not required.

    Args:
        to_controller: whether the server is a controller. If True, the client refuses a server whose certificate names a
            role other than `owner`.

    Raises:
        ConfigError: only one of certificate and key is set, or a file cannot be used.
    """
    return _client_context(_files(), to_controller) if is_tls_required() else None


@cache
def _server_context(files: _Files) -> ssl.SSLContext:
    """Return the context for servers with these files. Later calls return the same context."""
    return _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files, ssl.CERT_OPTIONAL)


@cache
def _client_context(files: _Files, to_controller: bool) -> ssl.SSLContext:
    """Return the context for clients with these files. Later calls return the same context."""
    # `PROTOCOL_TLS_CLIENT` checks the certificate chain and the host name.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if to_controller:
        context.sslsocket_class = _ControllerSocket
        context.sslobject_class = _ControllerObject
    if not files.ca:
        context.load_default_certs()
    return _load(context, files, ssl.CERT_REQUIRED)


class _ControllerSocket(ssl.SSLSocket):
    """TLS connection of a blocking client to a controller."""

    def do_handshake(self, block: bool = False) -> None:
        """Do the handshake, then check that the server may be a controller."""
        super().do_handshake(block)
        _check_controller(self.getpeercert())


class _ControllerObject(ssl.SSLObject):
    """TLS connection of an asynchronous client to a controller."""

    def do_handshake(self) -> None:
        """Do the handshake, then check that the server may be a controller."""
        super().do_handshake()
        _check_controller(self.getpeercert())


def _check_controller(certificate: Certificate | None) -> None:
    """Raise SSLCertVerificationError if the server's certificate names a role other than `owner`."""
    role = role_of_certificate(certificate)
    if role not in {None, Access.OWNER}:
        raise ssl.SSLCertVerificationError(
            f"the server's certificate must have role owner or no role, got {role}"
        )


def _load(context: ssl.SSLContext, files: _Files, verify: ssl.VerifyMode) -> ssl.SSLContext:
    """Load the files into a TLS context, and return the context. With a CA file, set the context's `verify_mode`.

    Raises:
        ConfigError: a file cannot be used.
    """
    try:
        if files.certificate:
            context.load_cert_chain(files.certificate, files.key)
        if files.ca:
            context.load_verify_locations(files.ca)
            context.verify_mode = verify
    # ssl.SSLError is a subclass of OSError.
    except OSError as error:
        raise ConfigError(
            f"{TLS_CA_VARIABLE}, {TLS_CERTIFICATE_VARIABLE} and {TLS_KEY_VARIABLE} must name PEM files "
            f"that belong together, got {files.ca!r}, {files.certificate!r}, {files.key!r}: {error}"
        ) from error
    return context
