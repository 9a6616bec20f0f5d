"""What all commands share: where text goes, how our errors look on a terminal, and how long work is shown."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from ...prompt import PromptsluiceError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


@cache
def out() -> "Console":
    """Results: standard output."""
    from rich.console import Console

    return Console(soft_wrap=True, highlight=False)


@cache
def err() -> "Console":
    """Progress and errors: standard error, so that output can be piped."""
    from rich.console import Console

    return Console(stderr=True, soft_wrap=True, highlight=False)


class CleanErrors(TyperGroup):
    """Our errors go to standard error without a traceback, exit code 1; anything else is our bug and keeps its own."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PromptsluiceError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error


@contextmanager
def bars(*, unit: str = "") -> "Iterator[Progress]":
    """Progress bars on standard error that count `unit` and estimate what is left; gone when the body ends, whatever
    ends it."""
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn(unit),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left:"),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=err(), transient=True) as shown:
        yield shown


def size(count: int | float) -> str:
    """Bytes for people: 1.4 GiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
