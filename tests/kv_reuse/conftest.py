"""Tiny models, and the float64 reference on the same weights, once a module; `directory` says of which families."""

from pathlib import Path

import pytest
from promptsluice.backend_engine.loader import LoadedModel, load_model

from .reference import Reference


@pytest.fixture(scope="module", params=["tiny_llama_dir", "tiny_qwen2_dir", "tiny_qwen3_dir"])
def directory(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def model(directory: Path) -> LoadedModel:
    return load_model(directory, dtype="float32")


@pytest.fixture(scope="module")
def reference(directory: Path) -> Reference:
    return Reference(directory)
