"""GGUF conversion: the converted folder holds the numbers and the tokens that the GGUF file stands for."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from promptsluice.backend_engine.hub.convert import convert_gguf

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, DIM = 64, 96, 2, 4, 2, 16
WORDS = [b"a", b"b", b"1", b"2", b" ", b"\n"]


def alphabet() -> list[str]:
    """The 256 characters of byte-level BPE, by byte."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [bytes_to_unicode()[byte] for byte in range(256)]


def write_gguf(path: Path) -> None:
    letters = alphabet()
    space, line = letters[32], letters[10]
    tokens = [*letters, line + line, space + "a", "<|im_end|>"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges([f"{line} {line}", f"{space} a"])
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_eos_token_id(len(tokens) - 1)
    for name, rows, columns in matrices(len(tokens)):
        values = np.random.default_rng(len(name)).normal(0, 0.3, (rows, columns)).astype(np.float32)
        packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1)
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    norms = ["output_norm.weight"]
    norms += [f"blk.{layer}.{name}_norm.weight" for layer in range(LAYERS) for name in ("attn", "ffn")]
    for name in norms:
        writer.add_tensor(name, np.linspace(0.5, 1.5, HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def matrices(vocab: int) -> list[tuple[str, int, int]]:
    """Name, rows and columns of every matrix."""
    shapes = [("token_embd.weight", vocab, HIDDEN)]
    for layer in range(LAYERS):
        shapes += [
            (f"blk.{layer}.attn_q.weight", HEADS * DIM, HIDDEN),
            (f"blk.{layer}.attn_k.weight", KV_HEADS * DIM, HIDDEN),
            (f"blk.{layer}.attn_v.weight", KV_HEADS * DIM, HIDDEN),
            (f"blk.{layer}.attn_output.weight", HIDDEN, HEADS * DIM),
            (f"blk.{layer}.ffn_gate.weight", FFN, HIDDEN),
            (f"blk.{layer}.ffn_up.weight", FFN, HIDDEN),
            (f"blk.{layer}.ffn_down.weight", HIDDEN, FFN),
        ]
    return shapes


@pytest.mark.slow
def test_conversion_is_faithful(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, into = tmp_path / "tiny.gguf", tmp_path / "model"
    into.mkdir()
    write_gguf(path)
    assert convert_gguf(path, into) == "Q4_1 dequantized to float32"

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    weights = load_file(into / "model.safetensors")
    for ours, theirs in (("embed_tokens", "token_embd"), ("layers.1.mlp.down_proj", "blk.1.ffn_down")):
        packed = tensors[f"{theirs}.weight"]
        expected = gguf.quants.dequantize(packed.data, packed.tensor_type)
        assert np.array_equal(weights[f"model.{ours}.weight"].numpy(), expected)
    assert "lm_head.weight" not in weights

    ids = torch.randint(0, 250, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)(ids).logits
        got = AutoModelForCausalLM.from_pretrained(into, dtype="auto")(ids).logits
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)

    tokenizer = AutoTokenizer.from_pretrained(into)
    # Digits stand apart, so the two line ends before the number are one token, as the model was trained.
    assert tokenizer.convert_ids_to_tokens(tokenizer("a\n\n12")["input_ids"]) == ["a", "ĊĊ", "1", "2"]
    assert tokenizer.decode(tokenizer("b a\n12 é")["input_ids"]) == "b a\n12 é"
