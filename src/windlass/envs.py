"""Access to environment variables. No other module reads or writes them."""

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
"""Variable with the address of the first node; a scheduler sets it for a reservation of several nodes."""
TLS_CA_VARIABLE = "WINDLASS_TLS_CA"
TLS_CERTIFICATE_VARIABLE = "WINDLASS_TLS_CERT"
TLS_KEY_VARIABLE = "WINDLASS_TLS_KEY"
TLS_VARIABLES = (TLS_CA_VARIABLE, TLS_CERTIFICATE_VARIABLE, TLS_KEY_VARIABLE)

_secrets: dict[str, str] = {}
"""Values of secret variables that `secret_value` removed from the environment."""


def check_token(token: str | None, what: str) -> str:
    """Return `token` if an HTTP header can carry it.

    The token may be empty if this process has a certificate, which then replaces the token: WINDLASS_TLS_CERT and
    WINDLASS_TLS_CA are set.

    Raises:
        ConfigError: the token is missing, or has line ends, other control characters, characters beyond
            ASCII, or blanks at its ends. The error does not contain the token.
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
    """Return whether this process has a certificate, which shows its role to peers without a token."""
    return all(map(environment_value, (TLS_CA_VARIABLE, TLS_CERTIFICATE_VARIABLE)))


def secret_value(name: str) -> str:
    """Return the value of a secret variable, or '' if it was never set.

    The first call removes the variable from the environment. Child processes (tools that run code of a model) then
    neither inherit the secret nor find it in /proc. Later calls return the same value.
    """
    if name in os.environ:
        _secrets[name] = os.environ[name]
        _overwrite(name)
        del os.environ[name]
    return _secrets.get(name, "")


def _overwrite(name: str) -> None:
    """Overwrite a value in the memory of the initial environment, which /proc shows while the process runs."""
    find = ctypes.CDLL(None).getenv
    find.restype = ctypes.c_void_p
    place = find(os.fsencode(name))
    if place is not None:
        ctypes.memset(place, ord("x"), len(os.fsencode(os.environ[name])))


def control_token() -> str:
    """Return the secret of the control routes, or the token of a role; empty if a certificate replaces it.

    The token is the value of WINDLASS_TOKEN or, if that is not set, the content of the file WINDLASS_TOKEN_FILE.

    Raises:
        ConfigError: neither variable is set, or an HTTP header cannot carry the token, or the file is refused:
            it is not a text file of this user, or other users can read or change it.
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
    """Return the text of a file without its last line end.

    Raises:
        ConfigError: the file is not a regular text file of this user, or other users can read or change it.
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
    """Return a copy of this process's environment for a child process.

    Args:
        with_tokens: whether the child gets this process's tokens, because it acts in the same role.
    """
    tokens = {name: secret_value(name) for name in (TOKEN_VARIABLE, ENGINE_TOKEN_VARIABLE)}
    given = {name: token for name, token in tokens.items() if token and with_tokens}
    return {**os.environ, **given}


_OF_ALLOCATION = ("SLURM_", "SLURMD_", "SRUN_", "PMIX_", "PMI_")
"""Prefixes of variables that Slurm sets for the job, step or task of a process."""
_OF_CLUSTER = ("SLURM_CONF", "SLURM_JWT")
"""Variables with such a prefix that are kept, because they tell a process how to reach Slurm."""


def environment_outside_jobs() -> dict[str, str]:
    """Return a copy of this process's environment without the variables of its Slurm job.

    `sbatch` and `srun` read these variables as options, and MPI would treat the child as a task of that job. Outside
    a job, SBATCH_ variables are kept, because they are the user's defaults.
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
    """Set each variable that is not set yet and return the current values of all."""
    return {name: os.environ.setdefault(name, value) for name, value in values.items()}


def set_values(values: Mapping[str, str]) -> None:
    """Set variables for the rest of this process."""
    os.environ.update(values)


def environment_value(name: str) -> str:
    """Return the value of a variable, or '' if it is not set."""
    return os.environ.get(name, "")


_TEMPORARY = threading.Lock()


@contextlib.contextmanager
def temporary_values(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables during the block, for a library that reads them in one call. Other callers wait."""
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
