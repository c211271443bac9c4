"""Access to environment variables. No other module reads or writes them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping

from windlass.errors import ConfigError

TOKEN_VARIABLE = "WINDLASS_TOKEN"  # noqa: S105 - the name of the variable
TOKEN_FILE_VARIABLE = "WINDLASS_TOKEN_FILE"  # noqa: S105 - as above
ENGINE_TOKEN_VARIABLE = "WINDLASS_ENGINE_TOKEN"  # noqa: S105 - as above
AGENT_TOKEN_VARIABLE = "WINDLASS_AGENT_TOKEN"  # noqa: S105 - as above
ROUTER_TOKEN_VARIABLE = "WINDLASS_ROUTER_TOKEN"  # noqa: S105 - as above
REWARD_TOKEN_VARIABLE = "WINDLASS_REWARD_TOKEN"  # noqa: S105 - as above
CONTROLLER_VARIABLE = "WINDLASS_CONTROLLER"
FIRST_NODE_VARIABLE = "WINDLASS_FIRST_NODE"
"""Variable with the address of the first node of a job with several nodes; see `windlass.jobs.schedulers.base`."""
TLS_CA_VARIABLE = "WINDLASS_TLS_CA"
TLS_CERTIFICATE_VARIABLE = "WINDLASS_TLS_CERT"
TLS_KEY_VARIABLE = "WINDLASS_TLS_KEY"
TLS_VARIABLES = (TLS_CA_VARIABLE, TLS_CERTIFICATE_VARIABLE, TLS_KEY_VARIABLE)

removed_secrets: dict[str, str] = {}
"""Values of secret variables that `secret_value` removed from the environment."""


def check_token(token: str | None, what: str) -> str:
    """Check that an HTTP header can carry `token`, and return it.

    The token may be empty if this process has a certificate (`has_certificate`), which replaces the token. `what` is the
    name of the argument or variable in errors.

    Raises:
        ConfigError: the token is missing, contains a character that is not printable ASCII, or begins or ends with a
            blank. The message does not contain the token.
    """
    if not token:
        if has_certificate():
            return ""
        raise ConfigError(f"{what} must not be empty, got {token!r}")
    if not (token.isascii() and token.isprintable()) or token != token.strip():
        odd = sorted({c for c in token if not (c.isascii() and c.isprintable())}) or [" "]
        raise ConfigError(
            f"{what} must be printable ASCII without blanks at its ends; remove these characters: {odd}"
        )
    return token


def has_certificate() -> bool:
    """Return whether this process has a TLS certificate, which replaces a token."""
    return all(map(environment_value, (TLS_CA_VARIABLE, TLS_CERTIFICATE_VARIABLE)))


def secret_value(name: str) -> str:
    """Return the value of a secret environment variable, or '' if the variable was never set.

    The first call removes the variable from the environment, so that child processes (such as tools that run code of a
    model) do not inherit the secret and cannot read it in /proc. Later calls return the same value.
    """
    if name in os.environ:
        removed_secrets[name] = os.environ[name]
        _overwrite(name)
        del os.environ[name]
    return removed_secrets.get(name, "")


def _overwrite(name: str) -> None:
    """Overwrite the value of a variable in the initial environment, which /proc/PID/environ shows."""
    find = ctypes.CDLL(None).getenv
    find.restype = ctypes.c_void_p
    place = find(os.fsencode(name))
    if place is not None:
        ctypes.memset(place, ord("x"), len(os.fsencode(os.environ[name])))


def control_token() -> str:
    """Return the token that this process sends to peers; empty if a certificate replaces the token.

    The token is the value of WINDLASS_TOKEN. If this variable is not set, the token is in the file that WINDLASS_TOKEN_FILE names.

    Raises:
        ConfigError: there is neither a token nor a certificate, or an HTTP header cannot carry the token. It is also
            raised if the file is not a text file of this user, or if other users can read or change the file.
    """
    if token := secret_value(TOKEN_VARIABLE):
        return check_token(token, TOKEN_VARIABLE)
    if path := environment_value(TOKEN_FILE_VARIABLE):
        return check_token(_token_in(path), f"{TOKEN_FILE_VARIABLE}: {path}")
    if not has_certificate():
        raise ConfigError(
            f"{TOKEN_VARIABLE} must be set to the controller's token, or {TOKEN_FILE_VARIABLE} to a file "
            f"that contains the token, got ''; the token is a secret that you choose for all processes of a run"
        )
    return ""


def _token_in(path: str) -> str:
    """Return the text of a file, without a newline at the end.

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
        raise ConfigError(
            f"{TOKEN_FILE_VARIABLE} must be a file that this user can read as text: {error}"
        ) from error


def inherited_environment(*, with_tokens: bool = False) -> dict[str, str]:
    """Return a copy of this process's environment for a child process.

    Args:
        with_tokens: whether to include this process's tokens, which `secret_value` has removed from the environment.
    """
    tokens = {name: secret_value(name) for name in (TOKEN_VARIABLE, ENGINE_TOKEN_VARIABLE)}
    given = {name: token for name, token in tokens.items() if token and with_tokens}
    return {**os.environ, **given}


_OF_ALLOCATION = ("SLURM_", "SLURMD_", "SRUN_", "PMIX_", "PMI_")
"""Prefixes of the variables that Slurm sets for a job, step or task."""
_OF_CLUSTER = ("SLURM_CONF", "SLURM_JWT")
"""Variables that a child process keeps although they have one of these prefixes: it needs them to reach Slurm."""


def environment_outside_jobs() -> dict[str, str]:
    """Return a copy of this process's environment without the variables of its Slurm job.

    In a child process, `sbatch` and `srun` would read these variables as options, and MPI would treat the child as a
    task of the job. If this process is not in a job, SBATCH_ variables are kept, because the user has set them.
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
    """Set each variable of `values` that is not set yet; return the current values of these variables."""
    return {name: os.environ.setdefault(name, value) for name, value in values.items()}


def set_values(values: Mapping[str, str]) -> None:
    """Set environment variables of this process."""
    os.environ.update(values)


def remove_values(names: Iterable[str]) -> None:
    """Remove environment variables of this process. Ignore names that are not set."""
    for name in names:
        os.environ.pop(name, None)


def environment_value(name: str) -> str:
    """Return the value of a variable, or '' if it is not set."""
    return os.environ.get(name, "")


_TEMPORARY = threading.Lock()


@contextlib.contextmanager
def temporary_values(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the `with` block, and restore the previous values after the block.

    If another thread is inside such a block, wait until that thread leaves the block.
    """
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
