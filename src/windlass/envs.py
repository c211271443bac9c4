"""The only reader and writer of environment variables."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping

from windlass.errors import ConfigError

__all__ = [
    "check_token",
    "control_token",
    "environment_value",
    "forget_tokens",
    "inherited_environment",
    "set_defaults",
    "temporary_values",
]

TOKEN_VARIABLE = "WINDLASS_TOKEN"  # noqa: S105 - the name of the variable
ENGINE_TOKEN_VARIABLE = "WINDLASS_ENGINE_TOKEN"  # noqa: S105 - as above


def check_token(token: str | None, what: str) -> str:
    """`token`, if a header can carry it.

    Raises:
        ConfigError: it is missing, or has line ends, other control characters, characters beyond
            ASCII, or blanks at its ends. The token itself is not repeated.
    """
    if not token:
        raise ConfigError(f"{what} must not be empty, got {token!r}")
    if not (token.isascii() and token.isprintable()) or token != token.strip():
        odd = sorted({c for c in token if not (c.isascii() and c.isprintable())}) or [" "]
        raise ConfigError(
            f"{what} must be printable ASCII with no blank at an end, got {odd} in it"
        )
    return token


def control_token() -> str:
    """The secret of the control routes, or the token of a role.

    Raises:
        ConfigError: WINDLASS_TOKEN is not set or empty, or no header can carry it.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(f"{TOKEN_VARIABLE} must be set to the controller's token, got ''")
    return check_token(token, TOKEN_VARIABLE)


def forget_tokens() -> None:
    """Take the tokens, once they are read, out of the environment, so that no child inherits them."""
    for name in (TOKEN_VARIABLE, ENGINE_TOKEN_VARIABLE):
        os.environ.pop(name, None)


def inherited_environment() -> dict[str, str]:
    """A copy of this process's environment, for a child."""
    return dict(os.environ)


def set_defaults(values: Mapping[str, str]) -> dict[str, str]:
    """Set variables that are not set yet; returns the values now in force."""
    return {name: os.environ.setdefault(name, value) for name, value in values.items()}


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
