"""The model that benchmarks widen to a larger shape computes what the small one does."""

import json
import shutil
from pathlib import Path

import torch
from promptsluice.backend_engine.loader import load_model
from widened import widened

from .driving import DEVICE, alone, greedy, random_ids, tiny_engine
from .writing import tiny_tokenizer

LARGER = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 530,
    "hidden_size": 160,
    "intermediate_size": 300,
    "num_hidden_layers": 5,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def test_its_tokens_are_the_small_models(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """With more layers, groups, members of each, dimensions of heads, hidden and inner ones, and ids."""
    shutil.copytree(tiny_llama_dir, tmp_path / "small")
    tiny_tokenizer().save(str(tmp_path / "small" / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (tmp_path / "small" / "tokenizer_config.json").write_text(json.dumps(config))
    small = load_model(tmp_path / "small", dtype="float32", device=DEVICE)
    large = widened(tmp_path / "small", LARGER, dtype=torch.float32, device=torch.device(DEVICE))
    assert (large.spec.hidden, large.spec.layers, large.spec.head_dim, large.spec.vocab) == (160, 5, 32, 530)
    for seed in range(3):
        request = greedy(random_ids(30, seed), 20)
        assert alone(tiny_engine(large), request).tokens == alone(tiny_engine(small), request).tokens
