"""llama.cpp and vLLM as subjects of engine_cpu.py, each in its own environment: imports nothing of promptsluice.

engine_cpu.py runs it: python cpu_peers.py llama.cpp|vllm MODEL THREADS. Reads a question a line, writes its seconds.
"""

import json
import os
import statistics
import sys
import time
from typing import Any

CONTEXT, SEQUENCES = 8192, 8


class LlamaCpp:
    """A GGUF file through llama.cpp's own batches, for its Python class decodes one sequence at a time."""

    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params: Any = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = CONTEXT, 512, 512, SEQUENCES
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True  # one cell pool for all sequences, else each gets an eighth of the context
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        assert self._context, f"{path}: llama.cpp cannot open it"
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(512, 0, 1)

    def ttft(self, prompts: list[list[int]]) -> float:
        self._lib.llama_memory_clear(self._memory, True)
        began = time.perf_counter()
        self._prefill(0, prompts[0])
        return time.perf_counter() - began

    def again(self, prompts: list[list[int]]) -> float:
        began, last = time.perf_counter(), len(prompts[0]) - 1
        self._lib.llama_memory_seq_rm(self._memory, 0, last, -1)
        self._run([(prompts[0][last], last, 0)])
        return time.perf_counter() - began

    def step(self, prompts: list[list[int]], tokens: int) -> float:
        self._lib.llama_memory_clear(self._memory, True)
        drawn = [self._prefill(number, ids) for number, ids in enumerate(prompts)]
        taken = []
        for done in range(tokens - 1):
            began = time.perf_counter()
            drawn = self._run([(token, len(prompts[row]) + done, row) for row, token in enumerate(drawn)])
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    def _prefill(self, sequence: int, ids: list[int]) -> int:
        rows = [(token, place, sequence) for place, token in enumerate(ids)]
        drawn: list[int] = []
        for start in range(0, len(rows), 512):
            drawn = self._run(rows[start : start + 512], last_only=True)
        return drawn[0]

    def _run(self, rows: list[tuple[int, int, int]], *, last_only: bool = False) -> list[int]:
        """Decode (token, place, sequence) rows; the likeliest next token of each, or of the last one."""
        import numpy as np

        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, place, sequence) in enumerate(rows):
            batch.token[row], batch.pos[row] = token, place
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = not last_only or row == len(rows) - 1
        if failed := self._lib.llama_decode(self._context, batch):
            raise SystemExit(f"llama_decode failed with {failed}")
        wanted = [len(rows) - 1] if last_only else range(len(rows))
        scores = (self._lib.llama_get_logits_ith(self._context, row) for row in wanted)
        return [int(np.ctypeslib.as_array(row, shape=(self._vocab,)).argmax()) for row in scores]


class Vllm:
    """vLLM's offline engine with its prefix cache on."""

    def __init__(self, directory: str, threads: int) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        self._engine: Any = LLM(
            model=directory, dtype="float32", max_model_len=CONTEXT, max_num_seqs=SEQUENCES, enable_prefix_caching=True
        )

    def ttft(self, prompts: list[list[int]]) -> float:
        return self._generate(prompts, 1)

    def again(self, prompts: list[list[int]]) -> float:
        return self._generate(prompts, 1)

    def step(self, prompts: list[list[int]], tokens: int) -> float:
        self._generate(prompts, 1)
        first = self._generate(prompts, 1)  # from the prefix cache, as the longer run
        return (self._generate(prompts, tokens) - first) / (tokens - 1)

    def _generate(self, prompts: list[list[int]], tokens: int) -> float:
        params = self._params(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        self._engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return time.perf_counter() - began


def say(seconds: float) -> None:
    print(json.dumps({"seconds": seconds}), flush=True)


def main() -> None:
    kind, model, threads = sys.argv[1:]
    began = time.perf_counter()
    peer = {"llama.cpp": LlamaCpp, "vllm": Vllm}[kind](model, int(threads))
    say(time.perf_counter() - began)
    for line in sys.stdin:
        question = json.loads(line)
        say(getattr(peer, question.pop("case"))(**question))


if __name__ == "__main__":
    main()
