"""Who may call what: a token per role, derived from one secret.

The owner's secret opens everything; a job on a laptop needs no other. From it a token per role is
derived (HMAC-SHA256), so nothing has to be stored or distributed but what each process is given,
and no role's token says anything about the secret or about another role's.

A server checks against the secret that it was given itself: the controller's is the owner's; a
rollout worker's or an engine's may be the owner's or the token of its own role.

With TLS a certificate may stand for the token: one that the server's authority has signed, with
`windlass-ROLE` as an organizational unit of its subject.
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
"""As `ssl.SSLSocket.getpeercert` returns it."""


UNIT_PREFIX = "windlass-"


class Access(StrEnum):
    """What a token, or a certificate, is for.

    OWNER: the secret itself; everything. TRAINER, ENGINE: a rank of the trainer job, of an engine.
    WORKER: a rollout worker, and the controller towards it. CLIENT: asks engines for tokens.
    OBSERVER: reads.
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
"""Route of a controller -> roles that may call it beside the owner; what is not here, the owner alone.

`/v1/agents` admits a trainer's token for trainer ranks only, and an engine's for engine ranks only.
"""


def role_token(secret: str, role: Access) -> str:
    """The token of a role; the owner's is the secret itself. Nothing follows from an empty secret."""
    if role is Access.OWNER or not secret:
        return secret
    message = f"windlass token of role {role.value}".encode()
    return f"{role.value}-{hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()}"


def role_environment(secret: str, role: Access) -> dict[str, str]:
    """The environment variables that give a process the tokens of its role, and no others."""
    if not secret:
        return {}
    variables = {TOKEN_VARIABLE: role_token(secret, role)}
    if role in {Access.ENGINE, Access.WORKER}:
        variables[ENGINE_TOKEN_VARIABLE] = role_token(secret, Access.CLIENT)
    return variables


def authorization(token: str) -> dict[str, str]:
    """Headers that carry a token; none for an empty one."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def role_of_certificate(certificate: Certificate | None) -> Access | None:
    """The role that a verified certificate names; None if it names none, or several."""
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
    """The tokens that a server knows.

    Args:
        secret: the owner's; the tokens that follow from it are known as well, none from an empty one.
        others: (token, its role); empty tokens are left out.
    """

    def __init__(self, secret: str, *others: tuple[str, Access]) -> None:
        derived = [(role_token(secret, role), role) for role in Access]
        tokens = [*derived, *others]
        self._known = [(f"Bearer {token}".encode(), role) for token, role in tokens if token]

    def role_of(self, authorization: str, certificate: Certificate | None = None) -> Access | None:
        """The role behind an `Authorization` header; None for a stranger. In constant time.

        Whoever sends no such header is who their certificate says.
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
    """Why `role` may not call a route, for a person; empty when it may."""
    roles = (Access.OWNER, *allowed)
    if role in roles:
        return ""
    return f"{method} {route} is for {', '.join(roles)}; the token is of role {role}"
