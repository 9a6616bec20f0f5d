"""The commands of `promptsluice`, put together. Building the tree imports no command's work."""

from typing import Annotated

import typer

from . import collections, demo, keys, kv, models, policy, serve
from .console import CleanErrors

app = typer.Typer(
    cls=CleanErrors,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Make LLM requests cheaper: prune, retrieve and reuse before the model works. Speaks the OpenAI API.",
)


def _print_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def main(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that stand before a command."""


@app.command()
def version() -> None:
    """Print the version."""
    from ... import __version__

    typer.echo(f"promptsluice {__version__}")


app.command("serve")(serve.serve)
app.command("demo")(demo.demo)
app.add_typer(models.app, name="models")
app.add_typer(policy.app, name="policy")
app.add_typer(keys.app, name="keys")
app.add_typer(collections.app, name="collections")
app.add_typer(kv.app, name="kv")
