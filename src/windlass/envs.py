"""The only reader and writer of environment variables."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import threading
from collections.abc import Iterator, Mapping

from windlass.errors import ConfigError

TOKEN_VARIABLE = "WINDLASS_TOKEN"  # noqa: S105 - the name of the variable
TOKEN_FILE_VARIABLE = "WINDLASS_TOKEN_FILE"  # noqa: S105 - as above
ENGINE_TOKEN_VARIABLE = "WINDLASS_ENGINE_TOKEN"  # noqa: S105 - as above
ROUTER_TOKEN_VARIABLE = "WINDLASS_ROUTER_TOKEN"  # noqa: S105 - as above
CONTROLLER_VARIABLE = "WINDLASS_CONTROLLER"
FIRST_NODE_VARIABLE = "WINDLASS_FIRST_NODE"
"""Set by a scheduler for processes of a reservation of several nodes: address of the first of them."""
TLS_CA_VARIABLE = "WINDLASS_TLS_CA"
TLS_CERTIFICATE_VARIABLE = "WINDLASS_TLS_CERT"
TLS_KEY_VARIABLE = "WINDLASS_TLS_KEY"
TLS_VARIABLES = (TLS_CA_VARIABLE, TLS_CERTIFICATE_VARIABLE, TLS_KEY_VARIABLE)

_secrets: dict[str, str] = {}
"""Values of variables that hold secrets and have left the environment."""


def check_token(token: str | None, what: str) -> str:
    """`token`, if a header can carry it.

    It may be empty where this process shows a certificate in its place: WINDLASS_TLS_CERT and
    WINDLASS_TLS_CA are set.

    Raises:
        ConfigError: it is missing, or has line ends, other control characters, characters beyond
            ASCII, or blanks at its ends. The token itself is not repeated.
    """
    if not token:
        if has_certificate():
            return ""
        raise ConfigError(f"{what} must not be empty, got {token!r}")
    if not (token.isascii() and token.isprintable()) or token != token.strip():
        odd = sorted({c for c in token if not (c.isascii() and c.isprintable())}) or [" "]
        raise ConfigError(
            f"{what} must be printable ASCII with no blank at an end, got {odd} in it"
        )
    return token


def has_certificate() -> bool:
    """Whether a peer can tell this process's role by its certificate, without a token."""
    return all(map(environment_value, (TLS_CA_VARIABLE, TLS_CERTIFICATE_VARIABLE)))


def secret_value(name: str) -> str:
    """The value of a variable that holds a secret, '' when it was never set.

    The variable leaves the environment: what this process starts (tools that run code of a model)
    does not inherit it, nor find it in /proc. A later call returns the same value.
    """
    if name in os.environ:
        _secrets[name] = os.environ[name]
        _overwrite(name)
        del os.environ[name]
    return _secrets.get(name, "")


def _overwrite(name: str) -> None:
    """The kernel shows the environment that a process began with for as long as it runs."""
    find = ctypes.CDLL(None).getenv
    find.restype = ctypes.c_void_p
    place = find(os.fsencode(name))
    if place is not None:
        ctypes.memset(place, ord("x"), len(os.fsencode(os.environ[name])))


def control_token() -> str:
    """The secret of the control routes, or the token of a role; empty where a certificate stands for it.

    It is the value of WINDLASS_TOKEN or, where that is not set, what the file of WINDLASS_TOKEN_FILE holds.

    Raises:
        ConfigError: neither is set, or no header can carry the token; or see `_token_in`.
    """
    if token := secret_value(TOKEN_VARIABLE):
        return check_token(token, TOKEN_VARIABLE)
    if path := environment_value(TOKEN_FILE_VARIABLE):
        return check_token(_token_in(path), f"{TOKEN_FILE_VARIABLE}: {path}")
    if not has_certificate():
        raise ConfigError(
            f"{TOKEN_VARIABLE} must be set to the controller's token, or {TOKEN_FILE_VARIABLE} to a file "
            f"that holds it, got ''"
        )
    return ""


def _token_in(path: str) -> str:
    """The text of a file, without the end of its line.

    Raises:
        ConfigError: it is no file that this user has and nobody else can read or change, or no text.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
                raise ConfigError(
                    f"{TOKEN_FILE_VARIABLE} must be a file that its user alone can read (mode 0600), "
                    f"got {path} of mode {stat.S_IMODE(found.st_mode):04o}"
                )
            if found.st_uid != os.geteuid():
                raise ConfigError(
                    f"{TOKEN_FILE_VARIABLE} must be a file of this user, got {path} of user {found.st_uid}"
                )
            return file.read().removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{TOKEN_FILE_VARIABLE} must be a file of this user: {error}") from error


def inherited_environment(*, with_tokens: bool = False) -> dict[str, str]:
    """A copy of this process's environment, for a child.

    Args:
        with_tokens: the child is a part of this process's role, and needs its tokens.
    """
    tokens = {name: secret_value(name) for name in (TOKEN_VARIABLE, ENGINE_TOKEN_VARIABLE)}
    given = {name: token for name, token in tokens.items() if token and with_tokens}
    return {**os.environ, **given}


_OF_ALLOCATION = ("SLURM_", "SLURMD_", "SRUN_", "PMIX_", "PMI_")
"""Beginnings of variables that Slurm sets for the job, the step or the task that a process runs in."""
_OF_CLUSTER = ("SLURM_CONF", "SLURM_JWT")
"""Variables that begin so and say how to reach Slurm."""


def environment_outside_jobs() -> dict[str, str]:
    """Return a copy of this process's environment without the variables of a Slurm job that it runs in.

    `sbatch` and `srun` read these as options, and MPI would take the child for a task of that job. SBATCH_
    variables are a user's own defaults outside of a job.
    """
    environment = inherited_environment()
    is_in_job = "SLURM_JOB_ID" in environment or "SLURM_JOBID" in environment
    prefixes = (*_OF_ALLOCATION, "SBATCH_") if is_in_job else _OF_ALLOCATION
    return {
        name: value
        for name, value in environment.items()
        if name in _OF_CLUSTER or not name.startswith(prefixes)
    }


def set_defaults(values: Mapping[str, str]) -> dict[str, str]:
    """Set variables that are not set yet; returns the values now in force."""
    return {name: os.environ.setdefault(name, value) for name, value in values.items()}


def set_values(values: Mapping[str, str]) -> None:
    """Set variables for as long as this process runs."""
    os.environ.update(values)


def environment_value(name: str) -> str:
    """The value of a variable, '' when it is not set."""
    return os.environ.get(name, "")


_TEMPORARY = threading.Lock()


@contextlib.contextmanager
def temporary_values(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for a library that reads them in one call; one caller at a time."""
    with _TEMPORARY:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
