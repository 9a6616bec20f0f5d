"""transformers and vLLM as peers of engine_gpu.py, each in a process of its own: imports nothing of promptsluice.

engine_gpu.py runs it: python gpu_peers.py transformers|vllm QUESTIONS. QUESTIONS is a JSON file with `config` (as in a
checkpoint's config.json), `batches`, `prompts`, `prompt` and `output` (tokens of the decode runs). Prints one line of
JSON: milliseconds of a decode step by batch, and of the first token, cold and cached, by prompt length.
"""

import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROUNDS = 3
# Without flashinfer and deep_gemm, which vLLM would import; nothing is fetched or reported.
VLLM_SETTINGS = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


class Transformers:
    """`generate` with its default cache: no prefix is kept, so a repeated prompt is computed anew."""

    caches = False

    def __init__(self, config: dict[str, Any], tokens: int) -> None:
        import torch
        import transformers

        self._torch = torch
        made = transformers.AutoConfig.for_model(**config)
        with torch.device("cuda"):
            self._model: Any = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).eval()
        self._model.generation_config.eos_token_id = None

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        ids = self._torch.tensor(prompts, device="cuda")
        self._torch.cuda.synchronize()
        began = time.perf_counter()
        made = self._model.generate(
            ids, attention_mask=self._torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
        self._torch.cuda.synchronize()
        assert made.shape[1] == ids.shape[1] + tokens, made.shape
        return time.perf_counter() - began


class Vllm:
    """Offline, FlashAttention 3 on Hopper, graphs and prefix cache as by default."""

    caches = True

    def __init__(self, config: dict[str, Any], tokens: int) -> None:
        os.environ.update(VLLM_SETTINGS)
        import vllm

        self._params = vllm.SamplingParams
        folder = Path(tempfile.mkdtemp(prefix="vllm-peer-"))
        (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
        self._engine: Any = vllm.LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=tokens,
            max_num_seqs=256,
            gpu_memory_utilization=0.85,
            generation_config="vllm",
            attention_config={"backend": "FLASH_ATTN", "flash_attn_version": 3},
        )

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        params = self._params(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        made = self._engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        taken = time.perf_counter() - began
        assert all(len(one.outputs[0].token_ids) == tokens for one in made)
        return taken


PEERS: dict[str, type[Transformers | Vllm]] = {"transformers": Transformers, "vllm": Vllm}


def main() -> None:
    name, path = sys.argv[1:]
    asked = json.loads(Path(path).read_text())
    config, draw = asked["config"], random.Random(0)
    peer = PEERS[name](config, max(asked["prompts"]) + 64)

    def prompts(count: int, tokens: int) -> list[list[int]]:
        return [[draw.randrange(3, config["vocab_size"]) for _ in range(tokens)] for _ in range(count)]

    def step_ms(batch: int) -> float:
        """The time that all tokens but the first take, prefills excluded."""
        peer.seconds(prompts(batch, asked["prompt"]), 4)
        first = min(peer.seconds(prompts(batch, asked["prompt"]), 1) for _ in range(2))
        whole = min(peer.seconds(prompts(batch, asked["prompt"]), asked["output"]) for _ in range(2))
        return (whole - first) / (asked["output"] - 1) * 1e3

    def ttft_ms(tokens: int) -> dict[str, float]:
        peer.seconds(prompts(1, tokens), 1)
        cold, cached = [], []
        for _ in range(ROUNDS):
            one = prompts(1, tokens)
            cold.append(peer.seconds(one, 1))
            if peer.caches:
                cached.append(peer.seconds(one, 1))
        found = {"cold": statistics.median(cold) * 1e3}
        return found | ({"cached": statistics.median(cached) * 1e3} if cached else {})

    ttft = {tokens: ttft_ms(tokens) for tokens in asked["prompts"]}
    print(json.dumps({"step": {batch: step_ms(batch) for batch in asked["batches"]}, "ttft": ttft}), flush=True)


if __name__ == "__main__":  # vLLM starts its engine as a child that imports this file
    main()
