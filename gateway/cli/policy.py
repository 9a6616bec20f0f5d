"""`promptsluice policy`: check a policy file, show what it would do to a request, list the presets. Loads no torch."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import err, out

if TYPE_CHECKING:
    from ...policies import Explanation, Policy, PolicySet
    from .token_counts import TokenCounts

app = typer.Typer(help="Policy files: check them, and see what they would do.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(help="A policy file (YAML).", show_default=False)]

_LEAST_WIDTH = 80


@app.command()
def check(file: File) -> None:
    """Check a policy file. Prints a summary, or every error as file:line: message and exits with 1."""
    from ...policies import PolicySet
    from ...prompt import ConfigError

    try:
        policies = PolicySet.load(file)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    for problem in policies.unset_environment():
        typer.echo(f"{file}:{problem.line}: warning: {problem.message}", err=True)
    _summary(policies)


@app.command()
def explain(
    file: File,
    request: Annotated[Path, typer.Option("--request", "-r", help="A Chat Completions body (JSON).")],
    policy: Annotated[
        str | None, typer.Option("--policy", "-p", help="Use this policy, whatever the file says.")
    ] = None,
    header: Annotated[list[str] | None, typer.Option("--header", "-H", help="A request header, 'name: value'.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show the plan for a request: what is done to each segment, why, and what it should cost and save."""
    from ...policies import PolicySet
    from ...policies import explain as explained
    from .token_counts import TokenCounts

    policies = PolicySet.load(file)
    counts = TokenCounts(policies)
    headers = dict(_header(text) for text in header or ())
    explanation = explained(policies, _read(request), count_for=counts.of, policy=policy, headers=headers)
    if json:
        import json as codec

        typer.echo(codec.dumps(explanation.to_wire(), ensure_ascii=False, indent=2))
    else:
        _show(explanation, counts)


@app.command()
def presets(name: Annotated[str | None, typer.Argument(help="Show this preset in full.")] = None) -> None:
    """List the presets that every policy file may use and extend, or print one as YAML."""
    import yaml

    from ...policies import PRESETS, PolicySet

    if name is not None and name in PRESETS:
        typer.echo(yaml.safe_dump({name: PRESETS[name]}, sort_keys=False), nl=False)
        return
    if name is not None:
        raise typer.BadParameter(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    from rich.table import Table

    table = Table("preset", "what it does", "steps", box=None)
    for preset, policy in PolicySet.default().policies.items():
        table.add_row(preset, policy.description, _steps(policy))
    out().print(table)


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon:
        raise typer.BadParameter(f"a header looks like 'name: value', not {text!r}")
    return name.strip(), value.strip()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be read: {error.strerror}") from error


def _steps(policy: "Policy") -> str:
    steps = [f"retrieve {policy.retrieve.collection}"] if policy.retrieve else []
    steps += [f"{spec.use} {spec.target_rate:.2f}" if spec.target_rate else spec.use for spec in policy.compress]
    reuse = policy.reuse
    steps.append(f"blend {reuse.least_ratio:.0%}" if reuse.mode == "blend" else f"kv {reuse.mode}")
    return ", ".join(steps)


def _summary(policies: "PolicySet") -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "name", "", box=None, show_header=False)
    for name, backend in policies.backends.items():
        table.add_row("backend", escape(name), f"{backend.kind}: {escape(', '.join(backend.models) or 'any model')}")
    for name, policy in policies.policies.items():
        mark = " (default)" if name == policies.default_policy else ""
        table.add_row("policy", escape(name) + mark, escape(_steps(policy)))
    for i, route in enumerate(policies.routes):
        rollout = route.rollout and f"{route.rollout.policy} for {route.rollout.percent:g} %"
        to = ", ".join(
            f"{what} {name}"
            for what, name in (
                ("policy", route.policy),
                ("rollout", rollout),
                ("shadow", route.shadow),
                ("backend", route.backend),
                ("on failure", route.on_failure if route.on_failure == "closed" else None),
            )
            if name
        )
        conditions = route.match.model_dump(exclude_defaults=True, exclude={"api_key_sha256"})
        table.add_row("route", str(i + 1), escape(f"{conditions or 'everything'} -> {to}"))
    out().print(table)
    out().print("the policy file is good", style="green")


def _show(explanation: "Explanation", counts: "TokenCounts") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    resolution, plan = explanation.resolution, explanation.plan
    out().print(
        f"policy {resolution.policy_name} ({resolution.reason}), "
        f"model {resolution.model}, backend {resolution.backend}",
        markup=False,
    )
    if resolution.shadow is not None:
        out().print(f"in shadow: policy {resolution.shadow} is carried out beside it and not sent", markup=False)
    if resolution.fail_closed:
        out().print("on failure: the request is refused, nothing is sent without the policy", markup=False)
    # On a narrow terminal the reasons need the room.
    wide = out().width >= 120
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("#", "segment", "tokens", "action", "ms", "saves"):
        table.add_column(title, no_wrap=True, justify="left" if title in ("segment", "action") else "right")
    table.add_column("reason")
    if wide:
        table.add_column("text", no_wrap=True)
    texts = {segment.id: segment.text for segment in explanation.prompt.segments}
    for decision in plan.decisions:
        cells = (
            str(decision.segment),
            f"{decision.role} {decision.kind}",
            str(decision.tokens) + (f" → {decision.tokens_after}" if decision.tokens_after != decision.tokens else ""),
            "\n".join(decision.uses) or str(decision.action),
            f"{decision.ms:.1f}" if decision.ms else "",
            f"{decision.saved_ms:.0f}" if decision.saved_ms else "",
            decision.reason,
            *([_preview(texts[decision.segment])] if wide else []),
        )
        table.add_row(*map(Text, cells))
    # Narrower, columns would be cut; of a width of its own, as `out` is everybody's.
    Console(soft_wrap=True, highlight=False, width=max(out().width, _LEAST_WIDTH)).print(table)
    for step in plan.steps:
        out().print(
            f"{step.name}: {step.tokens_before} -> {step.tokens_after} tokens, "
            f"costs {step.predicted_ms:.1f} ms, saves {step.saved_ms:.1f} ms",
            markup=False,
        )
    out().print(
        f"prompt: {plan.tokens_before} -> {plan.tokens_after} tokens, predicted {plan.prefill_ms:.0f} -> "
        f"{plan.predicted_ms:.0f} ms before the first token"
        + (" (nothing is done: the bytes go out as they came)" if plan.passthrough else ""),
        markup=False,
    )
    err().print(f"tokens: {counts.source(resolution.backend)}; times: default costs, not measured", markup=False)


def _preview(text: str) -> str:
    line = " ".join(text[:200].split())
    return line if len(line) <= 32 else line[:31] + "…"
