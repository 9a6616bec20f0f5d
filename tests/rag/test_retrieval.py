"""Retrieval with the real embedder: the demo's ten questions find their pages; vectors are what the contract says."""

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import yaml
from promptsluice.prompt import ModelUnavailable
from promptsluice.rag import Collections, SentenceEmbedder, documents_in

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "examples" / "data" / "fastapi_docs" / "en"


@pytest.fixture(scope="module")
def real(minilm_dir: Path) -> SentenceEmbedder:
    return SentenceEmbedder(str(minilm_dir))


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["model.safetensors", "config.json", "tokenizer.json", "1_Pooling/config.json"])
def test_a_damaged_embedder_is_named(minilm_dir: Path, tmp_path: Path, broken: str) -> None:
    copy = tmp_path / "embedder"
    shutil.copytree(minilm_dir, copy)
    with (copy / broken).open("rb+") as file:
        file.truncate(30)
    with pytest.raises(ModelUnavailable, match=f"{copy} cannot be loaded"):
        SentenceEmbedder(str(copy)).embed(["hello"])


@pytest.mark.slow
def test_vectors(real: SentenceEmbedder, minilm_dir: Path) -> None:
    texts = ["A short one.", "公园里有很多人。", "word " * 600, "", "A short one."]
    vectors = real.embed(texts)
    assert (vectors.shape, vectors.dtype) == ((5, real.dim), np.float32)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert np.allclose(vectors[0], real.embed(texts[:1])[0], atol=1e-5)  # whatever the batch
    assert real.embed([]).shape == (0, real.dim)
    assert real.identity == SentenceEmbedder("all-minilm-l6-v2").identity
    results: list[np.ndarray] = []
    threads = [threading.Thread(target=lambda: results.append(real.embed_queries(["A short one."]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.allclose(result[0], vectors[0], atol=1e-5) for result in results)


@pytest.mark.slow
def test_the_ten_questions_find_their_pages(real: SentenceEmbedder, smollm2_dir: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    collections = Collections(
        tmp_path,
        embedder=real,
        count_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids),
    )
    docs = collections.create("docs")
    docs.add(documents_in(PAGES))
    questions = yaml.safe_load((ROOT / "examples" / "questions.yaml").read_text(encoding="utf-8"))["questions"]
    assert len(questions) == 10
    found = [
        entry["page"] in [hit.document_id for hit in docs.search(entry["question"], top_k=4)] for entry in questions
    ]
    assert sum(found) >= 9
