"""/v1/collections: make, list, fill, search and delete document collections. All work runs in worker threads."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from ..policies.keyring import may_use_collection, require_collection
from ..prompt import BadRequest, UnknownCollection
from ..rag import Collections, Document
from .bodies import Body, read_body
from .deps import House, Known
from .house import Sluice
from .wire import dumps

router = APIRouter(prefix="/v1/collections")
MAX_ID = 1024  # characters of a document's id
T = TypeVar("T")


class NewCollection(Body):
    """`max_tokens` and `overlap` of its chunks, in tokens of the first backend."""

    name: str
    max_tokens: int = 256
    overlap: int = 0


class NewDocument(Body):
    """`markdown` null decides by the id's suffix and the text itself."""

    id: str = Field(min_length=1, max_length=MAX_ID)
    text: str
    metadata: dict[str, Any] = Field(default_factory=dict)
    markdown: bool | None = None


class NewDocuments(Body):
    """A batch: all of them are stored or none."""

    documents: list[NewDocument] = Field(min_length=1)


class Question(Body):
    """What to look for."""

    query: str
    top_k: int = 4


async def _permitted(caller: Known, name: str) -> str:
    """The collection in the path, where the caller's key may use it."""
    require_collection(caller.key, name)
    return name


Permitted = Annotated[str, Depends(_permitted)]


@router.post("")
async def create(request: Request, sluice: House, caller: Known) -> Response:
    """Make an empty collection."""
    raw = await request.body()

    def job(collections: Collections) -> dict[str, Any]:
        body = read_body(raw, NewCollection)
        require_collection(caller.key, body.name)
        collections.create(body.name, max_tokens=body.max_tokens, overlap=body.overlap)
        return _info(collections, body.name)

    return _json(await _run(sluice, job), status=201)


@router.get("")
async def list_all(sluice: House, caller: Known) -> Response:
    """All collections with their sizes."""
    found = await _run(
        sluice,
        lambda collections: [_wire(info) for info in collections.list() if may_use_collection(caller.key, info.name)],
    )
    return _json({"object": "list", "data": found})


@router.get("/{name}")
async def get(sluice: House, name: Permitted) -> Response:
    """One collection with its sizes."""
    return _json(await _run(sluice, lambda collections: _info(collections, name)))


@router.delete("/{name}")
async def delete(sluice: House, name: Permitted) -> Response:
    """Delete a collection with all its documents."""
    await _run(sluice, lambda collections: collections.delete(name))
    return _json({"object": "collection.deleted", "name": name, "deleted": True})


@router.get("/{name}/documents")
async def list_documents(sluice: House, name: Permitted) -> Response:
    """The ids of all documents."""
    ids = await _run(sluice, lambda collections: collections.get(name).document_ids())
    return _json({"object": "list", "data": [{"object": "document", "id": document} for document in ids]})


@router.post("/{name}/documents")
async def add_documents(request: Request, sluice: House, name: Permitted, id: str | None = None) -> Response:
    """Add or replace documents: a JSON batch, or one text or Markdown file as the body with `?id=` and type text/*."""
    raw = await request.body()
    as_file = request.headers.get("content-type", "").lower().startswith("text/")
    if as_file and not id:
        raise BadRequest("a document that is sent as text needs ?id=", param="id")
    if as_file and len(id or "") > MAX_ID:
        raise BadRequest(f"id must have at most {MAX_ID} characters", param="id")
    # Chunks are measured in the tokens of the first backend, so its tokenizer has to be there.
    await next(iter(sluice.backends.values())).available()

    def job(collections: Collections) -> dict[str, Any]:
        documents = [Document.from_bytes(str(id), raw)] if as_file else _documents(raw)
        return asdict(collections.get(name).add(documents))

    return _json({"object": "ingest", **await _run(sluice, job)})


@router.delete("/{name}/documents/{id:path}")
async def delete_document(sluice: House, name: Permitted, id: str) -> Response:
    """Take one document out."""
    await _run(sluice, lambda collections: collections.get(name).delete(id))
    return _json({"object": "document.deleted", "id": id, "deleted": True})


@router.post("/{name}/search")
async def search(request: Request, sluice: House, name: Permitted) -> Response:
    """The chunks nearest to a question, best first, with their scores."""
    raw = await request.body()

    def job(collections: Collections) -> list[dict[str, Any]]:
        body = read_body(raw, Question)
        return [asdict(hit) for hit in collections.get(name).search(body.query, top_k=body.top_k)]

    return _json({"object": "list", "data": [{"object": "hit", **hit} for hit in await _run(sluice, job)]})


async def _run(sluice: Sluice, job: Callable[[Collections], T]) -> T:
    return await sluice.librarians.run(lambda: job(sluice.rooms.collections()))


def _documents(raw: bytes) -> list[Document]:
    return [Document(**document.model_dump()) for document in read_body(raw, NewDocuments).documents]


def _info(collections: Collections, name: str) -> dict[str, Any]:
    collections.get(name).snapshot()
    for info in collections.list():
        if info.name == name:
            return _wire(info)
    raise UnknownCollection(f"there is no collection {name!r}", param="collection")


def _wire(info: Any) -> dict[str, Any]:
    return {"object": "collection", **asdict(info)}


def _json(value: Any, *, status: int = 200) -> Response:
    return Response(dumps(value), status, media_type="application/json")
