"""llmlingua and headroom as subjects of compress.py, each in its own environment: imports nothing of promptsluice.

compress.py runs it: python compress_peers.py llmlingua|headroom MODEL. Reads a task a line, {"text", "question",
"rate"}; writes what came out and the seconds of wall and processor time that it took.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


class LlmLingua:
    """LLMLingua's token pruning (question-aware, as its documentation calls it) with a causal model of ours."""

    def __init__(self, model: str) -> None:
        import tiktoken
        import torch

        torch.set_num_threads(1)
        # Only counts for its own report come from there, and it would be downloaded.
        tiktoken.encoding_for_model = lambda name: _Words()
        from llmlingua import PromptCompressor
        from transformers.utils import logging

        logging.set_verbosity_error()
        with tempfile.TemporaryDirectory() as folder:
            self._compressor: Any = PromptCompressor(_readable(Path(model), Path(folder)), device_map="cpu")

    def compress(self, text: str, question: str, rate: float) -> str:
        answer = self._compressor.compress_prompt(
            [text], rate=rate, question=question, use_context_level_filter=False, concate_question=False
        )
        return answer["compressed_prompt"]


class Headroom:
    """headroom-ai's model-free text crusher: whole sentences by BM25."""

    def __init__(self, model: str) -> None:
        from headroom.transforms.text_crusher import TextCrusher

        self._crusher: Any = TextCrusher()

    def compress(self, text: str, question: str, rate: float) -> str:
        return self._crusher.compress(text, context=question, target_ratio=rate).compressed


class _Words:
    def encode(self, text: str, **_: Any) -> list[str]:
        return text.split()


def _readable(model: Path, folder: Path) -> str:
    """A model directory that transformers 4.47 reads: its names of settings, the same weights and vocabulary.

    There the rope's base is a setting of its own; without it another one would be used, and the model would ramble.
    """
    for name in ("model.safetensors", "tokenizer.json", "generation_config.json"):
        (folder / name).symlink_to(model / name)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["torch_dtype"] = config.pop("dtype")
    tokenizer = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return str(folder)


def main() -> None:
    kind, model = sys.argv[1:]
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is no answer
    peer = {"llmlingua": LlmLingua, "headroom": Headroom}[kind](model)
    print(json.dumps({"ready": kind}), file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            answer = {"text": peer.compress(**task)}
        except Exception as error:  # noqa: BLE001 - a peer that fails on a text has that among its figures
            answer = {"error": f"{type(error).__name__}: {error}"[:200]}
        answer |= {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
