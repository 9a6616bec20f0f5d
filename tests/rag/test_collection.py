"""A collection's life: add, skip, replace, delete, search; what may go wrong with a document, a name or a question."""

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from promptsluice.prompt import BadRequest, Conflict, NotFound, PromptsluiceError, UnknownCollection
from promptsluice.rag import Collections, Document, documents_in, piece_of

CATS = Document(id="cats", text="Cats sleep all day and hunt mice at night.", metadata={"topic": "animals"})
CARS = Document(id="cars", text="Cars need fuel and roads and drivers.")


@pytest.mark.slow
def test_add_search_replace_delete(collections: Collections) -> None:
    pets = collections.create("pets")
    assert pets.search("mice") == []
    report = pets.add([CATS, CARS])
    assert (report.added, report.replaced, report.unchanged, report.chunks, report.generation) == (2, 0, 0, 2, 1)
    hit, other = pets.search("who hunts mice at night", top_k=5)
    assert (hit.chunk_id, hit.document_id, hit.text, hit.metadata) == (
        "cats#0",
        "cats",
        CATS.text,
        {"topic": "animals"},
    )
    assert 1.0 + 1e-6 >= hit.score > other.score
    assert pets.replace(Document(id="cats", text="Dogs chase cats.")).replaced == 1
    assert [hit.text for hit in pets.search("dogs chase", top_k=1)] == ["Dogs chase cats."]
    assert pets.delete("cats").deleted == 1
    assert pets.document_ids() == ["cars"]
    assert [hit.document_id for hit in pets.search("cats mice")] == ["cars"]
    with pytest.raises(NotFound, match="'cats'"):
        pets.delete("cats")
    with pytest.raises(NotFound, match="'cats'"):
        pets.replace(CATS)


def test_unchanged_documents_are_not_embedded_again(collections: Collections, embedder: Any) -> None:
    pets = collections.create("pets")
    pets.add([CATS, CARS])
    before = embedder.embedded
    report = pets.add([CATS, CARS])
    assert (report.unchanged, report.chunks, report.generation) == (2, 0, 1)
    assert embedder.embedded == before
    changed = pets.add([CARS, Document(id="cats", text=CATS.text, metadata={"topic": "other"})])
    assert (changed.replaced, changed.unchanged) == (1, 1)
    assert pets.search("mice", top_k=1)[0].metadata == {"topic": "other"}


def test_state_is_the_same_for_a_new_process(collections: Collections, reopen: Callable[..., Collections]) -> None:
    pets = collections.create("pets", max_tokens=20, overlap=4)
    pets.add([CATS])
    pets.add([CARS])
    pets.delete("cats")
    again = reopen().get("pets")
    assert again.search("fuel") == pets.search("fuel")
    assert again.settings == pets.settings
    again.add([CATS])
    assert pets.document_ids() == ["cars", "cats"]  # the other one sees it too
    (info,) = collections.list()
    assert (info.name, info.documents, info.chunks, info.generation) == ("pets", 2, 2, 4)


@pytest.mark.slow
def test_many_small_commits_stay_few_files(collections: Collections, reopen: Callable[..., Collections]) -> None:
    pets = collections.create("pets")
    for n in range(40):
        pets.add([Document(id=f"d{n % 25}", text=f"text number{n} about things")])
    files = [path.name for path in pets.folder.iterdir()]
    assert len(files) <= 2 * 17 + 1
    assert len(pets.document_ids()) == 25
    for n in range(20):
        pets.delete(f"d{n}")
    assert len(list(pets.folder.glob("*.npy"))) <= 3  # dead chunks are merged away
    for collection in (pets, reopen().get("pets")):
        assert collection.search("number24", top_k=1)[0].document_id == "d24"
        assert len(collection.search("text about things", top_k=100)) == 5


def test_top_k_ties_and_scores(collections: Collections) -> None:
    same = collections.create("same")
    same.add([Document(id=f"{n}", text="the very same words") for n in range(9)])
    hits = same.search("same words", top_k=4)
    assert [hit.document_id for hit in hits] == ["0", "1", "2", "3"]
    assert all(math.isclose(hit.score, hits[0].score, abs_tol=1e-6) for hit in hits)


def test_new_chunks_are_announced_as_they_stand_in_prompts(collections: Collections, tmp_path: Path) -> None:
    told: list[tuple[str, Sequence[str]]] = []
    heard = Collections(
        tmp_path / "heard",
        embedder=collections.create("x")._embedder,
        count_tokens=len,
        on_chunks=lambda name, texts: told.append((name, texts)),
    )
    pets = heard.create("pets")
    text = "\n\n  code </context> more  \n"
    pets.add([Document(id="a", text=text), CARS])
    pets.add([CARS])
    assert told == [("pets", ["  code &lt;/context> more", CARS.text])]
    assert pets.pieces() == list(told[0][1])
    assert [piece_of(hit.text) for hit in pets.search("code", top_k=1)] == [told[0][1][0]]


def test_chunks_that_are_in_no_document_any_more_are_announced(
    collections: Collections, reopen: Callable[..., Collections]
) -> None:
    gone: list[tuple[str, Sequence[str]]] = []
    collections.create("pets").add([CATS, CARS, Document(id="copy", text=CATS.text)])
    heard = reopen(on_gone=lambda name, texts: gone.append((name, texts)))
    pets = heard.get("pets")
    pets.add([CATS, Document(id="new", text="Fish swim.")])
    pets.delete("cats")
    assert gone == [], "the other document still has that chunk"
    pets.add([Document(id="copy", text="Birds fly.")])
    pets.delete("cars")
    heard.delete("pets")
    assert gone == [("pets", [CATS.text]), ("pets", [CARS.text]), ("pets", ["Birds fly.", "Fish swim."])]


def test_a_failing_hook_does_not_undo_the_commit(
    collections: Collections, reopen: Callable[..., Collections], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(name: str, texts: Sequence[str]) -> None:
        raise RuntimeError("no KV today")

    collections.create("pets")
    reopen(on_chunks=broken).get("pets").add([CATS])
    assert collections.get("pets").document_ids() == ["cats"]
    assert "a hook for changed chunks failed" in caplog.text
    reopen(on_gone=broken).get("pets").delete("cats")
    assert collections.get("pets").document_ids() == []
    reopen(on_gone=broken).delete("pets")
    assert collections.list() == []


BAD_DOCUMENTS = [
    (Document(id="nul", text="a\0b"), "binary"),
    (Document(id="surrogate", text="a\ud800"), "cannot be stored"),
    (Document(id="id\udfff", text="a"), "cannot be stored"),
    (Document(id="nan", text="a", metadata={"x": math.nan}), "cannot be stored"),
    (Document(id="object", text="a", metadata={"x": object()}), "cannot be stored"),
    (Document(id="mixed", text="a", metadata={"x": {1: 1, "b": 2}}), "cannot be stored"),
    (CATS, "given twice"),
]


@pytest.mark.parametrize(
    ("bad", "why"), BAD_DOCUMENTS, ids=[bad.id.encode("ascii", "replace").decode() for bad, _ in BAD_DOCUMENTS]
)
def test_one_bad_document_refuses_the_whole_batch(collections: Collections, bad: Document, why: str) -> None:
    pets = collections.create("pets")
    pets.add([CARS])
    with pytest.raises(BadRequest, match=why) as caught:
        pets.add([CATS, bad])
    assert repr(bad.id) in caught.value.message
    assert pets.document_ids() == ["cars"]
    assert pets.snapshot().manifest.generation == 1


def test_files_and_bytes(tmp_path: Path) -> None:
    assert Document.from_bytes("a", b"\xef\xbb\xbfna\xc3\xafve").text == "naïve"
    assert Document.from_bytes("a", "中文".encode("utf-16")).text == "中文"
    for data in (
        b"\xff\xfe\x00",
        b"\x89PNG\r\n\x1a\n",
        b"a\x00b",
        "é".encode("latin-1"),
        "\ud800".encode("utf-8", "surrogatepass"),
    ):
        with pytest.raises(BadRequest, match=r"document 'file\.bin'"):
            Document.from_bytes("file.bin", data)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_text("# B")
    (tmp_path / "a.txt").write_text("A")
    (tmp_path / "c.png").write_bytes(b"\x89PNG")
    assert [doc.id for doc in documents_in(tmp_path)] == ["a.txt", "sub/b.md"]
    for path in (tmp_path / "absent.md", tmp_path / "sub"):
        with pytest.raises(BadRequest, match="cannot be read"):
            Document.from_file(path)
    with pytest.raises(BadRequest, match="is no folder"):
        documents_in(tmp_path / "absent")


@pytest.mark.parametrize(
    ("id", "text", "markdown"),
    [
        ("a.MD", "x", True),
        ("a.txt", "# x", False),
        ("a", "# x", True),
        ("a", "x #", False),
        ("a.py", "```\nx\n```", True),
    ],
)
def test_what_counts_as_markdown(id: str, text: str, markdown: bool) -> None:
    assert Document(id=id, text=text).is_markdown is markdown
    assert Document(id=id, text=text, markdown=not markdown).is_markdown is not markdown


def test_empty_and_odd_documents(collections: Collections) -> None:
    odd = collections.create("odd")
    report = odd.add(
        [Document(id="", text=""), Document(id="../../x\n☃", text=" \n "), Document(id="a/b", text="words")]
    )
    assert (report.added, report.chunks) == (3, 1)
    assert odd.document_ids() == ["", "../../x\n☃", "a/b"]
    assert [hit.chunk_id for hit in odd.search("words")] == ["a/b#0"]
    odd.delete("a/b")
    assert odd.search("words") == []


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "a\\b", ".hidden", "-x", "a\0", "a" * 65, "ü", "a b", "a.", "a\n", "/etc"]
)
def test_names_cannot_leave_the_root(collections: Collections, name: str) -> None:
    for use in (collections.create, collections.get, collections.delete):
        with pytest.raises(BadRequest, match="cannot name a collection"):
            use(name)
    assert collections.list() == []


def test_making_and_deleting(collections: Collections) -> None:
    with pytest.raises(UnknownCollection):
        collections.get("pets")
    with pytest.raises(UnknownCollection):
        collections.delete("pets")
    assert collections.list() == []
    pets = collections.create("pets")
    pets.add([CATS])
    with pytest.raises(Conflict, match="already"):
        collections.create("pets")
    assert pets.document_ids() == ["cats"]
    collections.delete("pets")
    for use in (pets.document_ids, lambda: pets.add([CATS]), lambda: pets.search("x")):
        with pytest.raises(UnknownCollection):
            use()
    assert collections.create("pets").document_ids() == []
    collections.delete("pets")
    assert [path.name for path in collections.root.iterdir() if path.is_dir()] == []


@pytest.mark.slow
def test_what_another_process_deletes_is_unknown_and_not_listed(
    collections: Collections, reopen: Callable[..., Collections]
) -> None:
    collections.create("cats").add([CATS])
    reopen().delete("cats")
    with pytest.raises(UnknownCollection):
        collections.get("cats")

    def churn() -> None:
        other = reopen()
        for _ in range(50):
            other.create("cars").add([CARS])
            other.delete("cars")

    with ThreadPoolExecutor(1) as pool:
        churning = pool.submit(churn)
        while not churning.done():
            assert len(collections.list()) <= 1
        churning.result()


def test_a_writer_to_a_deleted_collection_does_not_reach_its_successor(
    reopen: Callable[..., Collections], new_embedder: Callable[[str], Any]
) -> None:
    embedder, entered, gate = new_embedder("words"), threading.Event(), threading.Event()
    collections = reopen(embedder=embedder)
    old = collections.create("pets")
    old.add([CATS])
    embed = embedder.embed

    def gated(texts: Sequence[str]) -> Any:
        entered.set()
        assert gate.wait(30)
        return embed(texts)

    embedder.embed = gated
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(old.add, [CARS])
        assert entered.wait(30)
        collections.delete("pets")
        making = pool.submit(collections.create, "pets", max_tokens=99)
        gate.set()
        with pytest.raises(UnknownCollection, match="deleted meanwhile"):
            writing.result()
        making.result()
    new = reopen().get("pets")
    assert (new.document_ids(), new.settings.max_tokens) == ([], 99)


@pytest.mark.parametrize("settings", [{"max_tokens": 4}, {"max_tokens": 10**6}, {"overlap": -1}, {"overlap": 200}])
def test_bad_settings(collections: Collections, settings: dict[str, int]) -> None:
    with pytest.raises(BadRequest) as caught:
        collections.create("pets", **settings)
    assert caught.value.param in settings
    assert collections.list() == []


@pytest.mark.parametrize(
    ("query", "top_k"), [("", 4), (" \n", 4), ("a\ud800", 4), ("a", 0), ("a", -1), ("a", 10**6), ("a", True)]
)
def test_bad_questions(collections: Collections, query: str, top_k: int) -> None:
    pets = collections.create("pets")
    with pytest.raises(BadRequest) as caught:
        pets.search(query, top_k=top_k)
    assert caught.value.param in ("query", "top_k")


def test_another_embedder_is_refused_until_embedded_again(
    collections: Collections, reopen: Callable[..., Collections], new_embedder: Callable[[str], Any]
) -> None:
    collections.create("pets").add([CATS, CARS])
    pets = reopen(embedder=new_embedder("other")).get("pets")
    for use in (lambda: pets.search("mice"), lambda: pets.add([CATS])):
        with pytest.raises(Conflict, match="was embedded by words, the embedder now is other"):
            use()
    pets.delete("cars")  # needs no embedder, and must not pretend that its vectors are the new one's
    with pytest.raises(Conflict):
        pets.search("mice")
    assert pets.reembed().chunks == 1
    assert [hit.document_id for hit in pets.search("mice")] == ["cats"]
    with pytest.raises(Conflict):
        collections.get("pets").search("mice")


@pytest.mark.parametrize("kind", ["manifest.json", "json", "npy"])
@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_damaged_files_are_named(
    collections: Collections, reopen: Callable[..., Collections], kind: str, how: str
) -> None:
    folder = collections.create("pets").folder
    collections.get("pets").add([CATS])
    path = folder / kind if kind == "manifest.json" else next(folder.glob(f"0*.{kind}"))
    data = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data if how == "flip" else data[:-3])
    if (kind, how) == ("manifest.json", "gone"):
        with pytest.raises(UnknownCollection):
            reopen().get("pets")
        return
    with pytest.raises(PromptsluiceError) as caught:
        reopen().get("pets")
    assert caught.value.code == "collection_damaged"
    assert str(path) in caught.value.message
    assert not isinstance(caught.value, UnknownCollection)


@pytest.mark.slow
def test_readers_see_whole_generations_while_one_writes(collections: Collections) -> None:
    """Each commit exchanges all documents for ones of another colour: a reader must never see two colours."""
    pets = collections.create("pets")
    pets.add([Document(id=f"{n}", text=f"red thing {n}") for n in range(6)])
    stop, seen, wrong = threading.Event(), set(), []

    def read() -> None:
        while not stop.is_set():
            colours = {hit.text.split()[0] for hit in pets.search("thing", top_k=6)}
            seen.update(colours)
            if len(colours) != 1:
                wrong.append(colours)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for colour in ("green", "blue", "white", "black") * 3:
        pets.add([Document(id=f"{n}", text=f"{colour} thing {n}") for n in range(6)])
    stop.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    assert seen <= {"red", "green", "blue", "white", "black"}


def test_two_writers_take_turns(collections: Collections, reopen: Callable[..., Collections]) -> None:
    collections.create("pets")
    several = [reopen().get("pets") for _ in range(3)]
    threads = [
        threading.Thread(target=lambda c=c, i=i: [c.add([Document(id=f"{i}-{n}", text="words")]) for n in range(5)])
        for i, c in enumerate(several)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(collections.get("pets").document_ids()) == 15
    assert collections.get("pets").snapshot().manifest.generation == 15
