"""Who may call what: a token per role, derived from one secret.

The owner's secret opens everything; a job on a laptop needs no other. From it a token per role is
derived (HMAC-SHA256), so nothing has to be stored or distributed but what each process is given,
and no role's token says anything about the secret or about another role's.

A server checks against the secret that it was given itself: the controller's is the owner's; a
rollout worker's or an engine's may be the owner's or the token of its own role.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from enum import StrEnum
from types import MappingProxyType
from typing import final

from windlass.envs import ENGINE_TOKEN_VARIABLE, TOKEN_VARIABLE

__all__ = ["ROUTES", "Access", "AccessGate", "refusal_of", "role_environment", "role_token"]


class Access(StrEnum):
    """What a token is for.

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
    """The token of a role; the owner's is the secret itself."""
    if role is Access.OWNER:
        return secret
    message = f"windlass token of role {role.value}".encode()
    return f"{role.value}-{hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()}"


def role_environment(secret: str, role: Access) -> dict[str, str]:
    """The environment variables that give a process the tokens of its role, and no others."""
    variables = {TOKEN_VARIABLE: role_token(secret, role)}
    if role in {Access.ENGINE, Access.WORKER}:
        variables[ENGINE_TOKEN_VARIABLE] = role_token(secret, Access.CLIENT)
    return variables


@final
class AccessGate:
    """The tokens that a server knows.

    Args:
        tokens: (token, its role); empty tokens are left out.
    """

    def __init__(self, tokens: Iterable[tuple[str, Access]]) -> None:
        self._known = [(f"Bearer {token}".encode(), role) for token, role in tokens if token]

    @classmethod
    def of_secret(cls, secret: str, roles: Iterable[Access]) -> AccessGate:
        """The owner's secret, and the tokens of `roles` derived from it."""
        return cls([(secret, Access.OWNER), *((role_token(secret, role), role) for role in roles)])

    def role_of(self, authorization: str) -> Access | None:
        """The role behind an `Authorization` header; None for a stranger. In constant time."""
        given = authorization.encode("utf-8", "surrogateescape")
        found = None
        for expected, role in self._known:
            if hmac.compare_digest(given, expected) and found is None:
                found = role
        return found


def refusal_of(role: Access, method: str, route: str, allowed: Iterable[Access]) -> str:
    """Why `role` may not call a route, for a person; empty when it may."""
    roles = (Access.OWNER, *allowed)
    if role in roles:
        return ""
    return f"{method} {route} is for {', '.join(roles)}; the token is of role {role}"
