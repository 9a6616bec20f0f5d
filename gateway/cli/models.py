"""`promptsluice models`: which models there are, getting one, and where it lies. Loads no torch but to convert."""

from typing import Annotated

import typer

from .console import err, out, size

app = typer.Typer(help="Chat and embedding models by name.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A catalogue name, a hub id (organisation/name), a folder or a GGUF file.")]


@app.command("list")
def list_models() -> None:
    """List the catalogue and what is in the cache."""
    from rich.table import Table

    from ...backend_engine.hub import catalogue

    table = Table(box=None)
    for column in ("model", "kind", "state", "size", "weights", "from"):
        table.add_column(column, overflow="fold", no_wrap=column == "model")
    for entry in catalogue():
        held = size(entry.bytes) if entry.bytes else ""
        table.add_row(
            entry.name, entry.kind, entry.state, held, entry.weights, entry.origin or ", ".join(entry.sources)
        )
    out().print(table)


@app.command()
def pull(name: Name) -> None:
    """Fetch a model into the cache, if it is not there, and print its folder."""
    from ...backend_engine import hub

    with hub.RichProgress() as progress:
        path = hub.pull(name, progress=progress)
    err().print(f"{name} is ready")
    typer.echo(path)


@app.command()
def path(name: Name) -> None:
    """Print where a model lies; an error if it has not been pulled."""
    from ...backend_engine.hub import resolve

    typer.echo(resolve(name))
