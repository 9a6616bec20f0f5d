"""Token classifiers from a folder: votes as transformers computes them, windows, whole words, rates, deadlines."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from promptsluice.compressors import CompressionContext, create, protected_spans
from promptsluice.prompt import BadRequest, ConfigError, Prompt

Make = Callable[..., CompressionContext]
PromptOf = Callable[..., Prompt]

TEXT = (
    "The committee met on Tuesday and agreed that the northern bridge would be repaired before the winter begins."
    " Nobody opposed the plan, but the treasurer asked for 3 offers and an invoice of $48,750 by 12 May 2025. "
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random BERT with two labels and 64 positions, with a tokenizer of words in pieces."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    path = tmp_path_factory.mktemp("classifier")
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator([TEXT], trainers.WordPieceTrainer(vocab_size=90, special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=64,
    )  # fmt: skip
    fast.save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64, initializer_range=0.5,
    )  # fmt: skip
    transformers.BertForTokenClassification(config).save_pretrained(path)
    return path


def told(folder: Path, text: str) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Offsets and probabilities of label 1 as transformers has them for a text of one window."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = transformers.AutoModelForTokenClassification.from_pretrained(folder).eval()
    encoded = tokenizer(text, return_offsets_mapping=True, return_tensors="pt")
    offsets = encoded.pop("offset_mapping")[0, 1:-1].tolist()
    with torch.inference_mode():
        kept = model(**encoded).logits[0, 1:-1].softmax(-1)[:, 1].numpy()
    return [(start, end) for start, end in offsets], kept


def forever() -> float:
    return 1e9


def test_votes_are_those_of_transformers(folder: Path) -> None:
    from promptsluice.compressors.token_classifier import TokenClassifier

    model = TokenClassifier.load(str(folder), 1)
    text = "The committee met on Tuesday and the treasurer agreed."
    offsets, kept = told(folder, text)
    short, other = model.votes([text, "The plan."], remaining=forever, clock=lambda: 0.0)
    rows = np.concatenate(short.rows)
    assert rows[:, :2].tolist() == [list(offset) for offset in offsets]
    assert np.abs(rows[:, 2] - kept).max() < 1e-5
    assert short.end == len(text) and other.end == len("The plan.")
    words = [(0, 3), (4, 13)]
    means = [np.mean([vote for (_, end), vote in zip(offsets, kept, strict=True) if low < end <= high])
             for low, high in words]  # fmt: skip
    assert np.allclose(short.of(words), means, atol=1e-5)


def test_windows_tell_of_each_token_once(folder: Path) -> None:
    from promptsluice.compressors.token_classifier import TokenClassifier

    text = TEXT * 12
    (votes,) = TokenClassifier.load(str(folder), 1).votes([text], remaining=forever, clock=lambda: 0.0)
    rows = np.concatenate(votes.rows)
    assert (np.diff(rows[:, 0]) > 0).all()
    assert {text[int(start) : int(end)] for start, end, _ in rows if not text[int(start)].isalnum()} <= set(".,$ ")
    covered = sum(int(end - start) for start, end, _ in rows)
    assert covered == len("".join(text.split()))


def test_rate_protection_and_whole_words(folder: Path, context: Make, prompt_of: PromptOf) -> None:
    text = TEXT * 6
    options = {"model": str(folder), "target_rate": 0.6}
    result = create("classifier", options).compress(prompt_of(text), context=context())
    assert result.note == ""
    assert 0.582 <= result.rate <= 0.6
    kept = result.changes[0].kept
    for start, end in protected_spans(text):
        assert any(low <= start and end <= high for low, high in kept)
    again = create("classifier", options).compress(prompt_of(text), context=context())
    assert again.changes == result.changes


@pytest.mark.slow
def test_what_was_not_judged_in_time_stays(folder: Path, context: Make, prompt_of: PromptOf) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.01
        return now

    text = TEXT * 120
    result = create("classifier", {"model": str(folder)}).compress(
        prompt_of(text), context=context(deadline=1.0, clock=clock)
    )
    assert "characters judged, the rest kept" in result.note or "deadline reached" in result.note


def test_folders_are_checked(folder: Path, tmp_path: Path, context: Make, prompt_of: PromptOf) -> None:
    from promptsluice.compressors.token_classifier import TokenClassifier

    with pytest.raises(BadRequest) as wrong:
        create("classifier", {"model": str(tmp_path / "none")})
    assert wrong.value.param == "model"
    with pytest.raises(ConfigError, match="cannot be loaded"):
        TokenClassifier.load(str(tmp_path), 1)
    with pytest.raises(ConfigError, match="no label 7"):
        TokenClassifier.load(str(folder), 7)
    prompt = prompt_of(TEXT * 6)
    result = create("classifier", {"model": str(tmp_path)}).compress(prompt, context=context())
    assert result.prompt is prompt
    assert "classifier failed (ConfigError)" in result.note
