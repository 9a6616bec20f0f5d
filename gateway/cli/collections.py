"""`promptsluice collections`: documents into collections, and out again. Works on the files; no server is needed.

A running gateway sees what was committed at its next request; writers of several processes take turns.
"""

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import bars, err, out, size
from .serve import Config, fetch_models, set_environment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ...policies import PolicySet
    from ...rag import Collection, Collections, Document

app = typer.Typer(help="Document collections for retrieval.", no_args_is_help=True)

_BATCH = 8  # documents a commit: few commits, and a bar that moves

Folder = Annotated[Path, typer.Argument(help="Folder with Markdown and text files, taken with all below it.")]
Name = Annotated[str, typer.Argument(help="Name of the collection.")]


@app.command()
def ingest(
    folder: Folder,
    collection: Annotated[str, typer.Option("--collection", "-n", help="Its name; made if it is not there.")] = "docs",
    config: Config = None,
    max_tokens: Annotated[int, typer.Option(help="Longest chunk; for a new collection only.")] = 256,
    overlap: Annotated[int, typer.Option(help="Tokens that neighbours share; for a new collection only.")] = 0,
    warm: Annotated[bool, typer.Option(help="Compute the chunks' KV ahead, too.")] = True,
) -> None:
    """Add a folder's documents. Those that have not changed since are skipped; the rest replace what had their path."""
    from ...prompt import UnknownCollection
    from ...rag import documents_in

    policies = ready(config)
    documents = documents_in(folder)
    collections = opened(policies)
    try:
        target = collections.get(collection)
    except UnknownCollection:
        target = collections.create(collection, max_tokens=max_tokens, overlap=overlap)
    err().print(added(target, documents))
    if warm:
        from .kv import warmed

        err().print(warmed(policies, target.name, target.pieces()))


@app.command("list")
def list_collections(config: Config = None) -> None:
    """List collections with their sizes."""
    from rich.table import Table

    from ...policies import PolicySet

    table = Table("collection", "documents", "chunks", "longest chunk", "size", box=None)
    for info in opened(PolicySet.load(config)).list():
        longest = f"{info.settings.max_tokens} tokens"
        table.add_row(info.name, str(info.documents), str(info.chunks), longest, size(info.bytes))
    out().print(table)


@app.command()
def search(
    collection: Name,
    query: Annotated[str, typer.Argument(help="A question or some words.")],
    top_k: Annotated[int, typer.Option("--top-k", "-k", help="How many chunks.")] = 4,
    config: Config = None,
) -> None:
    """Print the chunks nearest to a question, best first, with the cosine of their angle."""
    for hit in opened(ready(config)).get(collection).search(query, top_k=top_k):
        typer.echo(f"{hit.score:.3f}  {hit.chunk_id}  {' > '.join(hit.headings)}")
        typer.echo("\n".join(f"    {line}" for line in hit.text.strip().splitlines()))


@app.command()
def delete(
    collection: Name,
    document: Annotated[str | None, typer.Option("--document", "-d", help="Only this document, by its path.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    config: Config = None,
) -> None:
    """Delete a collection, or one document of it."""
    from ...policies import PolicySet

    what = f"the document {document} of {collection}" if document else f"the collection {collection}"
    collections = opened(ready(config) if document else PolicySet.load(config))
    target = collections.get(collection)
    if not yes:
        typer.confirm(f"Delete {what}?", abort=True, err=True)
    if document:
        target.delete(document)
    else:
        collections.delete(collection)
    err().print(f"deleted {what}")


@app.command()
def reembed(collection: Name, config: Config = None) -> None:
    """Compute all vectors of a collection anew, after the embedding model has changed."""
    err().print(f"embedding {collection} anew")
    report = opened(ready(config)).get(collection).reembed()
    err().print(f"{collection}: {report.replaced} documents, {report.chunks} chunks embedded anew")


def ready(config: Path | None) -> "PolicySet":
    """The policy set, with its models in the cache."""
    set_environment()
    from ...policies import PolicySet

    policies = PolicySet.load(config)
    fetch_models(policies, offline=False)
    return policies


def opened(policies: "PolicySet") -> "Collections":
    """The collections of a policy set. Models load when one is first needed; chunks are counted as the gateway does."""
    from ...rag import Collections, SentenceEmbedder
    from .kv import forgotten
    from .token_counts import TokenCounts

    first = next(iter(policies.backends))
    return Collections(
        policies.collections_root,
        embedder=SentenceEmbedder(_embedder_of(policies)),
        count_tokens=TokenCounts(policies).of(first),
        on_gone=lambda name, texts: forgotten(policies, name, texts),
    )


def _embedder_of(policies: "PolicySet") -> str:
    """Where the embedder lies; its name, where it is not here: then only what needs no vectors works."""
    from ...prompt import ModelUnavailable
    from .serve import hub_of

    try:
        return str(hub_of(policies).resolve(policies.models.embedder))
    except ModelUnavailable:
        return policies.models.embedder


def added(target: "Collection", documents: "Sequence[Document]") -> str:
    """Add the documents with a bar, and say what came of it."""
    new = replaced = unchanged = chunks = 0
    with bars(unit="documents") as shown:
        task = shown.add_task(f"ingesting into {target.name}", total=len(documents))
        for batch in batches(documents):
            report = target.add(batch)
            new, replaced = new + report.added, replaced + report.replaced
            unchanged, chunks = unchanged + report.unchanged, chunks + report.chunks
            shown.advance(task, len(batch))
    return f"{target.name}: {new} added, {replaced} replaced, {unchanged} unchanged; {chunks} new chunks"


def batches(documents: "Sequence[Document]") -> "Iterator[list[Document]]":
    """The documents in batches, the last one shorter."""
    rest = iter(documents)
    while batch := list(islice(rest, _BATCH)):
        yield batch
