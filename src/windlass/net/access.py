"""Access to routes: one token per role, derived from one secret.

The owner's secret opens every route; a job on a laptop needs no other token. The token of each role
is derived from it (HMAC-SHA256), so only the tokens that a process receives are stored or
distributed. The token of a role reveals neither the secret nor the token of another role.

A server checks tokens against the secret that it was given. The controller has the owner's secret.
A rollout worker or an engine has either the owner's secret or its role's token.

With TLS a certificate may replace the token. The server's authority must have signed it, and its
subject must have `windlass-ROLE` as an organizational unit.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import final

from windlass.envs import ENGINE_TOKEN_VARIABLE, TOKEN_VARIABLE

Certificate = Mapping[str, object]
"""Certificate as `ssl.SSLSocket.getpeercert` returns it."""


UNIT_PREFIX = "windlass-"


class Access(StrEnum):
    """Role that a token or a certificate stands for.

    Attributes:
        OWNER: the secret itself; may call everything.
        TRAINER: a rank of the trainer job.
        ENGINE: a rank of an engine.
        WORKER: a rollout worker, and the controller when it calls one.
        CLIENT: may ask engines for tokens.
        OBSERVER: may read.
    """

    OWNER = "owner"
    TRAINER = "trainer"
    ENGINE = "engine"
    WORKER = "worker"
    CLIENT = "client"
    OBSERVER = "observer"


ROUTES = MappingProxyType(
    {
        "/v1/agents": (Access.TRAINER, Access.ENGINE),
        "/v1/callback": (Access.TRAINER,),
        "/v1/train_workers/{name}": (Access.TRAINER,),
        "/v1/batches": (Access.TRAINER,),
        "/v1/workers": (Access.WORKER,),
        "/v1/status": (Access.OBSERVER,),
        "/v1/overview": (Access.OBSERVER,),
        "/v1/events": (Access.OBSERVER,),
        "/v1/rollouts/status": (Access.OBSERVER,),
        "/metrics": (Access.OBSERVER,),
    }
)
"""Routes of a controller, with the roles that may call them besides the owner. Only the owner may
call a route that is not listed.

`/v1/agents` accepts a trainer's token for trainer ranks only, and an engine's token for engine
ranks only.
"""


def role_token(secret: str, role: Access) -> str:
    """Return the token of a role: the secret itself for the owner, and "" if the secret is empty."""
    if role is Access.OWNER or not secret:
        return secret
    message = f"windlass token of role {role.value}".encode()
    return f"{role.value}-{hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()}"


def role_environment(secret: str, role: Access) -> dict[str, str]:
    """Return the environment variables with the tokens of a role, and no others."""
    if not secret:
        return {}
    variables = {TOKEN_VARIABLE: role_token(secret, role)}
    if role in {Access.ENGINE, Access.WORKER}:
        variables[ENGINE_TOKEN_VARIABLE] = role_token(secret, Access.CLIENT)
    return variables


def authorization(token: str) -> dict[str, str]:
    """Return the headers that carry a token; none for an empty one."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def role_of_certificate(certificate: Certificate | None) -> Access | None:
    """Return the role that a verified certificate names; None if it names no role or several."""
    subject = (certificate or {}).get("subject")
    units = {
        value.removeprefix(UNIT_PREFIX)
        for names in (subject if isinstance(subject, tuple) else ())
        for key, value in names
        if key == "organizationalUnitName" and value.startswith(UNIT_PREFIX)
    }
    found = [role for role in Access if role.value in units]
    return found[0] if len(found) == len(units) == 1 else None


@final
class AccessGate:
    """Check of the tokens that a server accepts.

    Args:
        secret: the owner's secret. The tokens derived from it are accepted too; an empty secret has
            none.
        others: pairs of a token and its role. Empty tokens are ignored.
    """

    def __init__(self, secret: str, *others: tuple[str, Access]) -> None:
        derived = [(role_token(secret, role), role) for role in Access]
        tokens = [*derived, *others]
        self._known = [(f"Bearer {token}".encode(), role) for token, role in tokens if token]

    def role_of(self, authorization: str, certificate: Certificate | None = None) -> Access | None:
        """Return the role of an `Authorization` header, in constant time; None if the token is unknown.

        Without the header, the role comes from the client certificate.
        """
        if not authorization:
            return role_of_certificate(certificate)
        given = authorization.encode("utf-8", "surrogateescape")
        found = None
        for expected, role in self._known:
            if hmac.compare_digest(given, expected) and found is None:
                found = role
        return found


def refusal_of(role: Access, method: str, route: str, allowed: Collection[Access]) -> str:
    """Return the reason why `role` may not call a route, for a person; empty if it may."""
    roles = (Access.OWNER, *allowed)
    if role in roles:
        return ""
    return f"{method} {route} is for {', '.join(roles)}; the token is of role {role}"
