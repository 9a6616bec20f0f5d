"""Who may see what on the page: a key its own requests; everything where the policy file has no keys."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from ..caller import caller_of
from ..deps import House
from ..house import Sluice


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """Somebody who looks. `tenant` is whose requests they see, None for everybody's; `system`: also what all share."""

    sluice: Sluice
    key_name: str | None = None
    tenant: str | None = None
    system: bool = True


async def _viewer(request: Request, sluice: House) -> Viewer:
    """Unauthorized where the policy file lists keys and this is none of them. Any key may look at what it has sent."""
    caller = caller_of(request.headers, request_id=request.state.request_id)
    key = sluice.policy_set.authenticate(caller.api_key)
    if key is None:
        return Viewer(sluice=sluice)
    admin = "admin" in key.scopes
    return Viewer(
        sluice=sluice,
        key_name=key.name,
        tenant=None if admin else caller.tenant,
        system=admin or "metrics" in key.scopes or sluice.policy_set.server.metrics == "open",
    )


Looking = Annotated[Viewer, Depends(_viewer)]
