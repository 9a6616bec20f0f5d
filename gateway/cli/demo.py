"""`promptsluice demo`: ten questions under three policies against a real gateway process, and a table of the figures.

Under `off` and `balanced` the client retrieves for itself and sends passages along; under `rag` it sends the question
alone and the gateway retrieves. The machine's speed is in the times: compare the policies, not machines.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import demo_docs
from .console import bars, err, out
from .demo_ask import ask, connect, require_sdk
from .demo_server import ended_in_order, running_gateway
from .demo_table import Asked, as_json, show

if TYPE_CHECKING:
    from openai import OpenAI

    from ...rag import Collection, Document

MODEL = "smollm2-135m-instruct"
POLICIES = ("off", "balanced", "rag")
COLLECTION = "docs"  # the one that the preset `rag` asks
TOP_K = 4
FIRST = (
    "What is this documentation about?"  # asked before each policy's questions and not counted: it loads what is lazy
)
WARM_ALL = 100  # chunks; of more, only what the questions find: two cores compute a few hundred tokens a second

Docs = Annotated[
    Path,
    typer.Option(exists=True, file_okay=False, help="Folder of Markdown and text; if it has a part `en`, only that."),
]
Questions = Annotated[Path, typer.Option(exists=True, dir_okay=False, help="YAML file with a list of questions.")]
Json = Annotated[Path | None, typer.Option(help="Write all figures to this file, too.")]


def demo(docs: Docs = demo_docs.DOCS, questions: Questions = demo_docs.QUESTIONS, json: Json = None) -> None:
    """Ingest documents, start the gateway, ask ten questions under off, balanced and rag, and compare."""
    require_sdk()
    asked = demo_docs.questions_of(questions)
    pages = demo_docs.pages_of(docs)
    with ended_in_order(), tempfile.TemporaryDirectory(prefix="promptsluice-demo-") as root:
        config = Path(root, "policies.yaml")
        config.write_text(policy_file(root))
        collection = ingested(config, pages, asked)
        with served(config) as base_url:
            rows = ask_all(base_url, collection, asked)
    show(rows, out())
    if json is not None:
        _write(json, rows, pages=len(pages))


def policy_file(root: str) -> str:
    """The default model and the presets, among which the demo chooses, with all data below `root`."""
    import yaml

    return yaml.safe_dump(
        {
            "version": 1,
            "default_policy": "off",
            "policies": {"off": {"extends": "off", "allow_client_policy": list(POLICIES)}},
            "backends": {"local": {"kind": "embedded", "model": MODEL}},
            "collections": {"root": f"{root}/collections"},
            "kv_cache": {"path": f"{root}/kv"},
        }
    )


def ingested(config: Path, pages: "Sequence[Document]", questions: Sequence[str]) -> "Collection":
    """A new collection of the pages, with the KV of its chunks computed ahead, as `collections ingest` does it."""
    from .collections import added, opened, ready
    from .kv import warmed

    policies = ready(config)
    collection = opened(policies).create(COLLECTION)
    err().print(added(collection, pages))
    texts = collection.pieces()
    if len(texts) > WARM_ALL:
        texts = found_by(collection, [FIRST, *questions])
        err().print(f"computing KV only for the {len(texts)} chunks that the questions find")
    err().print(warmed(policies, COLLECTION, texts))
    return collection


def found_by(collection: "Collection", questions: Sequence[str]) -> list[str]:
    """The chunks that retrieval finds for the questions, as they stand in prompts."""
    from ...rag import piece_of

    hits = [hit for question in questions for hit in collection.search(question, top_k=TOP_K)]
    return list(dict.fromkeys(piece_of(hit.text) for hit in hits))


@contextmanager
def served(config: Path) -> Iterator[str]:
    """The URL of a gateway that runs as a process of its own until the body ends."""
    with (
        err().status("starting the gateway") as shown,
        running_gateway(config, log=config.with_name("server.log")) as base_url,
    ):
        shown.stop()
        yield base_url


def ask_all(base_url: str, collection: "Collection", questions: Sequence[str]) -> list[Asked]:
    """Each question under each policy in turn, one at a time; before, one that does not count and loads what is lazy.

    A policy has a client key of its own, so that none profits from the prefixes of the one before.
    """
    rows: list[Asked] = []
    with bars(unit="answers") as shown, ExitStack() as stack:
        task = shown.add_task("asking", total=len(POLICIES) * len(questions))
        clients = {policy: stack.enter_context(connect(base_url, api_key=f"demo-{policy}")) for policy in POLICIES}
        for policy, client in clients.items():
            ask_one(client, collection, policy, FIRST)
        for question in questions:
            for policy, client in clients.items():
                rows.append(ask_one(client, collection, policy, question))
                shown.advance(task)
    return rows


def ask_one(client: "OpenAI", collection: "Collection", policy: str, question: str) -> Asked:
    """Ask with passages in the prompt, but for `rag`, where retrieval is the gateway's."""
    hits = [] if policy == "rag" else collection.search(question, top_k=TOP_K)
    return ask(client, MODEL, policy, question, [hit.text for hit in hits])


def _write(file: Path, rows: Sequence[Asked], *, pages: int) -> None:
    import json

    about = {"model": MODEL, "policies": POLICIES, "pages": pages, "top_k": TOP_K}
    file.write_text(json.dumps(as_json(rows, about=about), ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
