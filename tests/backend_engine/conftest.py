"""The tiny model that most tests here run on, and transformers on its weights and on the real model's."""

from pathlib import Path

import pytest
from promptsluice.backend_engine.loader import LoadedModel, load_model

from .driving import DEVICE, Reference


@pytest.fixture(scope="session")
def model(tiny_llama_dir: Path) -> LoadedModel:
    return load_model(tiny_llama_dir, dtype="float32", device=DEVICE)


@pytest.fixture(scope="session")
def reference(tiny_llama_dir: Path) -> Reference:
    return Reference(tiny_llama_dir)


@pytest.fixture(scope="session")
def real_reference(smollm2_dir: Path) -> Reference:
    return Reference(smollm2_dir)
