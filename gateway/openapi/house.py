"""The rest: embeddings, tokens, models, collections, health."""

from ..routes_collections import NewCollection, NewDocuments, Question
from ..routes_embeddings import Embeddings
from ..routes_tokenize import TextOrChat, Tokens
from .kinds import COUNT, NUMBER, OBJECT, TEXT, WHOLE, YES_NO, Schema
from .schema import Operation, const, either, form_of, many, or_null, record, ref


def _listed(item: Schema) -> Schema:
    return record({"object": const("list"), "data": many(item)})


def _asked(form: Schema) -> Schema:
    """With the model as all other bodies have it."""
    return {**form, "properties": {**form["properties"], "model": ref("Model")}}


_DELETED: dict[str, Schema] = {"object": TEXT, "deleted": YES_NO}
_READY = record({"status": TEXT, "reasons": {"type": "object", "additionalProperties": TEXT}}, {"policy_file": TEXT})

SCHEMAS: dict[str, Schema] = {
    # An upstream's models may take more than the house's own embedder does.
    "EmbeddingsRequest": {**_asked(form_of(Embeddings)), "additionalProperties": True},
    "Embeddings": record(
        {
            "object": const("list"),
            "data": many(
                record({"object": const("embedding"), "index": COUNT, "embedding": either(many(NUMBER), TEXT)})
            ),
            "model": TEXT,
        },
        {"usage": record({"prompt_tokens": COUNT, "total_tokens": COUNT})},
    ),
    "TokenizeRequest": {
        **_asked(form_of(TextOrChat)),
        "oneOf": [record({"prompt": TEXT}), record({"messages": many(ref("Message"), least=1)})],
    },
    "DetokenizeRequest": _asked(form_of(Tokens)),
    "ModelCard": record(
        {"id": TEXT, "object": const("model"), "created": WHOLE, "owned_by": TEXT}, {"max_model_len": COUNT}
    ),
    "NewCollection": form_of(NewCollection),
    "NewDocuments": form_of(NewDocuments),
    "Question": form_of(Question),
    "Collection": record(
        {
            "object": const("collection"),
            "name": TEXT,
            "documents": COUNT,
            "chunks": COUNT,
            "bytes": COUNT,
            "generation": COUNT,
            "settings": OBJECT,
        }
    ),
    "Ingest": record(
        {"object": const("ingest")}
        | dict.fromkeys(("added", "replaced", "unchanged", "deleted", "chunks", "generation"), COUNT)
    ),
    "Hit": record(
        {"object": const("hit"), "chunk_id": TEXT, "document_id": TEXT, "text": TEXT, "score": NUMBER}
        | {"metadata": OBJECT, "headings": many(TEXT), "start": COUNT, "end": COUNT}
    ),
}
OPERATIONS: dict[str, Operation] = {
    "POST /v1/embeddings": Operation(tag="OpenAI", body=ref("EmbeddingsRequest"), answer=ref("Embeddings")),
    "POST /tokenize": Operation(
        tag="House",
        body=ref("TokenizeRequest"),
        answer=record(
            {"count": COUNT, "tokens": many(COUNT), "max_model_len": or_null(COUNT)}, {"token_strs": many(TEXT)}
        ),
    ),
    "POST /detokenize": Operation(tag="House", body=ref("DetokenizeRequest"), answer=record({"prompt": TEXT})),
    "GET /v1/models": Operation(tag="OpenAI", answer=_listed(ref("ModelCard"))),
    "GET /v1/models/{model}": Operation(tag="OpenAI", answer=ref("ModelCard")),
    "POST /v1/collections": Operation(
        tag="Collections", body=ref("NewCollection"), answer=ref("Collection"), status=201
    ),
    "GET /v1/collections": Operation(tag="Collections", answer=_listed(ref("Collection"))),
    "GET /v1/collections/{name}": Operation(tag="Collections", answer=ref("Collection")),
    "DELETE /v1/collections/{name}": Operation(tag="Collections", answer=record({"name": TEXT, **_DELETED})),
    "GET /v1/collections/{name}/documents": Operation(
        tag="Collections", answer=_listed(record({"object": const("document"), "id": TEXT}))
    ),
    "POST /v1/collections/{name}/documents": Operation(
        tag="Collections", body=ref("NewDocuments"), answer=ref("Ingest"), text_body=True
    ),
    "DELETE /v1/collections/{name}/documents/{id}": Operation(
        tag="Collections", answer=record({"id": TEXT, **_DELETED})
    ),
    "POST /v1/collections/{name}/search": Operation(
        tag="Collections", body=ref("Question"), answer=_listed(ref("Hit"))
    ),
    "GET /v1/originals/{original_id}": Operation(
        tag="House", answer=record({"id": TEXT, "object": const("original"), "text": TEXT})
    ),
    "GET /healthz": Operation(
        tag="Health", answer=record({"status": const("ok")}), also={503: record({"status": const("hung")})}, open=True
    ),
    "GET /readyz": Operation(tag="Health", answer=_READY, also={503: _READY}, open=True),
    "GET /metrics": Operation(tag="Health", answer=None, open=True),
}
