"""What a model's makers recommend: read where the directory says so, refused where no request could ask for it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from promptsluice.backend_engine.loader import load_model
from promptsluice.backend_engine.params import SamplingDefaults, recommended
from promptsluice.prompt.errors import ConfigError


def test_a_directorys_recommendation_is_loaded(tiny_llama_dir: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_llama_dir, directory)
    named = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "do_sample": True}
    (directory / "generation_config.json").write_text(json.dumps({**named, "eos_token_id": [7, 8], "min_p": None}))
    model = load_model(directory)
    expected = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05)
    assert recommended(model.generation_config) == expected
    assert model.spec.eos_ids == (7, 8)
    (directory / "generation_config.json").unlink()
    assert recommended(load_model(directory).generation_config) == SamplingDefaults()


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", 9), ("temperature", "hot"), ("top_k", 0.5), ("repetition_penalty", 0)]
)
def test_nonsense_is_refused_with_the_way_out(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*generation_config: none"):
        recommended({name: value})


def test_minus_one_means_no_limit() -> None:
    assert recommended({"top_k": -1}).top_k == 0
