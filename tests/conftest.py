"""Session fixtures: tiny random models for arithmetic, and the real default models from the cache."""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from promptsluice.backend_engine.loader import LoadedModel

# Threads that spin while they wait steal the other core's time; must be set before torch loads its OpenMP runtime.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Workers of pytest-xdist, and the processes that their tests start, share the cores.
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _WORKERS > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _WORKERS)))

# A red run must be about the change: the same examples everywhere, and no limit that a busy machine breaks.
# `--hypothesis-profile=explore` looks further.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", _PATIENT)
settings.register_profile("house", _PATIENT, derandomize=True)
settings.load_profile("house")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with many slow tests first: workers take files in this order, and none should begin a long one last."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


def _tiny(architecture: str, path: Path, **extra: object) -> Path:
    """Save a random float32 model of a few layers; big enough that GQA, page borders and rope all matter."""
    import torch
    import transformers

    family = getattr(transformers, f"{architecture}ForCausalLM")
    settings: dict[str, object] = {
        "vocab_size": 512,
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.2,
    }
    config = family.config_class(**settings | extra)
    torch.manual_seed(0)
    model = family(config).float()
    for value in model.parameters():
        if not value.any():  # biases, and norms that multiply by 1 + weight
            torch.nn.init.normal_(value, std=0.5)
    model.save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread for tiny models, whose products take less time than waking a second one does."""
    torch = sys.modules.get("torch")
    if torch is None or not {"smollm2_dir", "minilm_dir"}.isdisjoint(request.fixturenames):
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _tiny("Llama", tmp_path_factory.mktemp("tiny-llama"), tie_word_embeddings=True)


@pytest.fixture(scope="session")
def tiny_qwen2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _tiny("Qwen2", tmp_path_factory.mktemp("tiny-qwen2"), tie_word_embeddings=False)


@pytest.fixture(scope="session")
def tiny_qwen3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _tiny("Qwen3", tmp_path_factory.mktemp("tiny-qwen3"), tie_word_embeddings=False)


@pytest.fixture(scope="session")
def tiny_gemma3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers in four see 24 keys, with another rope than the fourth."""
    rope = {"rope_type": "linear", "factor": 4.0}
    return _tiny("Gemma3", tmp_path_factory.mktemp("tiny-gemma3"), sliding_window=24, sliding_window_pattern=4,
                 query_pre_attn_scalar=24, rope_scaling=rope)  # fmt: skip


@pytest.fixture(scope="session")
def tiny_mistral_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a window that tests' prompts exceed."""
    return _tiny("Mistral", tmp_path_factory.mktemp("tiny-mistral"), sliding_window=20)


@pytest.fixture(scope="session")
def tiny_smollm3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The second and the fourth layer have no positions."""
    return _tiny("SmolLM3", tmp_path_factory.mktemp("tiny-smollm3"), no_rope_layer_interval=2, pad_token_id=0)


@pytest.fixture(scope="session")
def few_words_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that says little but the ids 3 to 6: it repeats itself often, and strays from it as often."""
    import torch
    import transformers

    path = _tiny("Llama", tmp_path_factory.mktemp("few-words"), tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        said = torch.zeros(512, 1)
        said[3:7] = 3.0
        model.lm_head.weight *= said
    model.save_pretrained(path)
    return path


def _pulled(name: str) -> Path:
    from promptsluice.backend_engine.hub import pull

    return pull(name)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The real default chat model; pulled once into the cache."""
    return _pulled("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def smollm2(smollm2_dir: Path) -> "LoadedModel":
    """The real default chat model in float32 on the CPU."""
    from promptsluice.backend_engine.loader import load_model

    return load_model(smollm2_dir, dtype="float32")


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """The real default embedder; pulled once into the cache."""
    return _pulled("all-minilm-l6-v2")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a tiny model with other settings: `tiny_model("Llama", rope_parameters={...})`."""
    return lambda architecture, **extra: _tiny(architecture, tmp_path_factory.mktemp("tiny"), **extra)
