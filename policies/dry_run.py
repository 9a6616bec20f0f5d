"""A dry run: what would be done to a request, and why. Nothing is retrieved, rewritten or sent."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..prompt import BadRequest, Prompt
from .costs import CostModel
from .match import Resolution
from .openness import opened
from .planner import Count, plan
from .policyset import PolicySet
from .rollout import beginning
from .steps import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The request as it was cut, where it goes, and the plan."""

    prompt: Prompt
    resolution: Resolution
    plan: Plan

    def to_wire(self) -> dict[str, Any]:
        """As JSON: the plan, and where the request goes and why."""
        return {"resolution": self.resolution.to_wire(), **self.plan.to_wire()}


def explain(
    policies: PolicySet,
    raw: bytes,
    *,
    count_for: Callable[[str], Count],
    policy: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Explanation:
    """Plan a Chat Completions body. `policy` overrules what the file would choose.

    `count_for` gives a backend's token counter. Costs are the defaults for the kind of backend. BadRequest,
    UnknownModel and UnknownPolicy as at the gateway.
    """
    prompt = Prompt.from_body(raw, max_depth=policies.server.max_depth)
    model = prompt.body.get("model")
    if not isinstance(model, str) or not model:
        raise BadRequest("model must be a non-empty string", param="model")

    def size() -> int:
        # The backend is not known before the route is; any backend's tokens are near enough for a range.
        count = count_for(next(iter(policies.backends)))
        return sum(count(segment.text) for segment in prompt.segments)

    resolution = policies.resolve(model, headers=headers, prompt_tokens=size, conversation=lambda: beginning(prompt))
    if policy is not None:
        chosen = policies.policy(policy)
        resolution = replace(resolution, policy=chosen, policy_name=policy, reason="asked for")
    embedded = policies.backends[resolution.backend].kind == "embedded"
    prompt = opened(prompt, resolution.policy)
    made = plan(
        prompt,
        resolution.policy,
        CostModel() if embedded else CostModel.upstream(),
        count=count_for(resolution.backend),
        kv_reuse=embedded,
    )
    return Explanation(prompt=prompt, resolution=resolution, plan=made)
