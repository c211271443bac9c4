"""Access to HTTP routes: one secret, and one token per role that is derived from the secret.

The user who starts a job is its owner, and WINDLASS_TOKEN is the owner's secret. The secret gives
access to all routes, so a job on a laptop needs no other token. The token of a role is derived from
the secret (HMAC-SHA256), and reveals neither the secret nor the tokens of other roles. So a process
needs only the token of its role.

A server is started with a secret, and accepts this secret and the tokens derived from it. The controller
has the owner's secret. A rollout worker or an engine has either the owner's secret or its role's token.

With TLS a client certificate may replace the token. The server's certificate authority must have signed
the certificate, and the certificate's subject must have `windlass-ROLE` as an organizational unit.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import final

from windlass.envs import AGENT_TOKEN_VARIABLE, ENGINE_TOKEN_VARIABLE, TOKEN_VARIABLE

Certificate = Mapping[str, object]
"""Certificate as `ssl.SSLSocket.getpeercert` returns it."""


UNIT_PREFIX = "windlass-"
"""Text before the role in an organizational unit of a certificate."""


class Access(StrEnum):
    """Role that a token or a certificate stands for.

    Attributes:
        OWNER: holder of the secret; may call every route.
        TRAINER: a trainer rank.
        ENGINE: a rank of an engine.
        WORKER: a rollout worker, or the controller when it calls a worker.
        CLIENT: may request generated tokens from engines.
        OBSERVER: may read status and metrics.
        AGENT: may claim rollouts at the chat endpoint of a rollout worker.
    """

    OWNER = "owner"
    TRAINER = "trainer"
    ENGINE = "engine"
    WORKER = "worker"
    CLIENT = "client"
    OBSERVER = "observer"
    AGENT = "agent"


ROUTES = MappingProxyType(
    {
        "/v1/agents": (Access.TRAINER, Access.ENGINE),
        "/v1/callback": (Access.TRAINER,),
        "/v1/train_workers/{name}": (Access.TRAINER,),
        "/v1/batches": (Access.TRAINER,),
        "/v1/batches/tensors": (Access.TRAINER,),
        "/v1/batches/confirm": (Access.TRAINER,),
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

On `/v1/agents`, a trainer's token is accepted only for a trainer rank, and an engine's token only
for an engine rank.
"""


def role_token(secret: str, role: Access) -> str:
    """Return the token of a role, derived from the secret. The owner's token is the secret itself.

    If the secret is empty, the token of every role is empty.
    """
    if role is Access.OWNER or not secret:
        return secret
    message = f"windlass token of role {role.value}".encode()
    return f"{role.value}-{hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()}"


def role_environment(secret: str, role: Access) -> dict[str, str]:
    """Return environment variables with the tokens that a process of this role needs. Empty if `secret` is empty.

    An engine or a worker also gets the token that authorises a worker's requests to engines. A worker also gets the
    token that authorises an agent's requests to the worker.
    """
    if not secret:
        return {}
    name = AGENT_TOKEN_VARIABLE if role is Access.AGENT else TOKEN_VARIABLE
    variables = {name: role_token(secret, role)}
    if role in {Access.ENGINE, Access.WORKER}:
        variables[ENGINE_TOKEN_VARIABLE] = role_token(secret, Access.CLIENT)
    if role is Access.WORKER:
        variables[AGENT_TOKEN_VARIABLE] = role_token(secret, Access.AGENT)
    return variables


def authorization(token: str) -> dict[str, str]:
    """Return the HTTP headers that carry a token; no headers for an empty token."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def role_of_certificate(certificate: Certificate | None) -> Access | None:
    """Return the role that a verified client or server certificate names.

    Return None if there is no certificate, or if the certificate does not name exactly one known role.
    """
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
    """Tokens that a server accepts, and the role of each.

    Args:
        secret: the owner's secret. The tokens derived from it are accepted too. With an empty
            secret, only `others` are accepted.
        others: additional tokens, each with its role. Empty tokens are ignored.
    """

    def __init__(self, secret: str, *others: tuple[str, Access]) -> None:
        derived = [(role_token(secret, role), role) for role in Access]
        tokens = [*derived, *others]
        self._known = [(f"Bearer {token}".encode(), role) for token, role in tokens if token]

    def role_of(self, authorization: str, certificate: Certificate | None = None) -> Access | None:
        """Return the role of a request; None if the request has no known role.

        Args:
            authorization: value of the `Authorization` header. All known tokens are compared, each in constant time.
            certificate: verified client certificate, which counts only if the header is empty.
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
    """Return the reason why a caller may not call a route; "" if the caller may.

    Args:
        role: role of the caller.
        method: HTTP method.
        route: path of the route.
        allowed: roles that may call the route besides the owner.
    """
    roles = (Access.OWNER, *allowed)
    if role in roles:
        return ""
    return f"{method} {route} needs role {' or '.join(roles)}, but this caller has role {role}"
