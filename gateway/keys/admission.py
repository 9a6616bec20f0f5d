"""At the door: who asks, whether the key opens this route, and whether its limits have room. Reads no body."""

from dataclasses import replace
from typing import TYPE_CHECKING

from ...policies.keyring import require_scope
from ...policies.schema import Scope
from ...prompt import Forbidden, PromptsluiceError, Unauthorized
from ..caller import Caller
from .key_metrics import UNKNOWN
from .scopes import SPENDING, scope_of
from .ticket import Ticket

if TYPE_CHECKING:
    from ..house import Sluice

_MESSAGES = "/v1/messages"


async def admitted(sluice: "Sluice", caller: Caller, *, method: str, path: str) -> Caller:
    """The caller with the entry of the key and an open ticket, which somebody has to close.

    Routes that need no key let everybody in, without a ticket. Unauthorized, Forbidden, RateLimited; Overloaded where
    the limits cannot be counted and the policy file does not want requests then.
    """
    scope = scope_of(method, path)
    if scope is None or (scope == "metrics" and sluice.policy_set.server.metrics == "open"):
        return caller
    caller = identified(sluice, caller, scope=scope, what=f"{method} {path[:200]}")
    if scope == "metrics":
        return caller
    defaults = sluice.policy_set.server.limits
    ticket = Ticket(
        key=caller.key,
        limits=defaults if caller.key is None else caller.key.limits_over(defaults),
        counters=sluice.counters,
        metrics=sluice.metrics.keys,
        anthropic=path == _MESSAGES or path.startswith(f"{_MESSAGES}/"),
    )
    await ticket.open(spends=method == "POST" and path in SPENDING)
    return replace(caller, ticket=ticket)


def identified(sluice: "Sluice", caller: Caller, *, scope: Scope, what: str) -> Caller:
    """The caller with the entry of the key, if the file has keys. Unauthorized, or Forbidden without the scope."""
    name = UNKNOWN
    try:
        key = sluice.policy_set.authenticate(caller.api_key)
        name = UNKNOWN if key is None else key.name
        require_scope(key, scope, what=what)
    except PromptsluiceError as error:
        outcome = {Unauthorized: "unauthorized", Forbidden: "forbidden"}[type(error)]
        sluice.metrics.keys.at_the_door(name, outcome)
        raise
    return replace(caller, key=key)
