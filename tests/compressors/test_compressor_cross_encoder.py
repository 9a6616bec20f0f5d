"""Units chosen by a cross-encoder from a folder: its order counts, time is kept, and folders are checked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from promptsluice.compressors import CompressionContext, create
from promptsluice.prompt import BadRequest, ConfigError, Prompt

Make = Callable[..., CompressionContext]
PromptOf = Callable[..., Prompt]
TextsOf = Callable[[Prompt], list[str]]

SENTENCES = [
    "The fox sees the nut.",
    "The owl eats the egg.",
    "The bear hides the berry.",
    "The wolf finds the river.",
    "The hare likes the meadow.",
    "The crow sees the apple.",
    "The toad eats the fly.",
    "The mole hides the worm.",
    "The deer finds the leaf.",
    "The swan likes the reed.",
]
QUESTION = "Which animal likes the meadow and the reed?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random BERT with one score for a pair of texts."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    path = tmp_path_factory.mktemp("cross")
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator([*SENTENCES, QUESTION], trainers.WordLevelTrainer(special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=64,
    ).save_pretrained(path)  # fmt: skip
    torch.manual_seed(0)
    config: Any = transformers.BertConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64, initializer_range=0.5,
    )  # fmt: skip
    config.num_labels = 1
    transformers.BertForSequenceClassification(config).save_pretrained(path)
    return path


def by_hand(folder: Path) -> np.ndarray:
    """The score of each sentence as transformers has it."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    encoded = tokenizer([QUESTION] * len(SENTENCES), SENTENCES, padding=True, return_tensors="pt")
    with torch.inference_mode():
        return model(**encoded).logits[:, 0].numpy()


def test_what_fits_the_question_best_stays(
    folder: Path, context: Make, prompt_of: PromptOf, tool_texts: TextsOf
) -> None:
    options = {
        "relevance": "cross_encoder",
        "model": str(folder),
        "redundancy": 0.0,
        "target_rate": 0.5,
        "min_tokens": 1,
    }
    asking = {"role": "user", "content": QUESTION}
    prompt = Prompt.from_messages([asking, *prompt_of(" ".join(SENTENCES)).messages[2:4]])
    result = create("extractive", options).compress(prompt, context=context(question=QUESTION))
    (short,) = tool_texts(result.prompt)
    kept = [n for n, sentence in enumerate(SENTENCES) if sentence in short]
    best = np.argsort(-by_hand(folder))[: len(kept)]
    assert "failed" not in result.note
    assert 3 <= len(kept) <= 5
    assert kept == sorted(best.tolist())


def test_what_was_not_read_in_time_stays(folder: Path, context: Make, prompt_of: PromptOf, tool_texts: TextsOf) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.01
        return now

    text = " ".join(SENTENCES * 40)
    options = {"relevance": "cross_encoder", "model": str(folder)}
    result = create("extractive", options).compress(
        prompt_of(text, question=QUESTION), context=context(question=QUESTION, deadline=0.2, clock=clock)
    )
    assert "sentences judged, the rest kept" in result.note or "deadline reached" in result.note
    assert tool_texts(result.prompt)[0].endswith(SENTENCES[-1])


def test_folders_are_checked(folder: Path, tmp_path: Path, context: Make, prompt_of: PromptOf) -> None:
    from promptsluice.compressors.cross_encoder import CrossEncoder

    for options in ({"relevance": "cross_encoder"}, {"model": str(folder)}):
        with pytest.raises(BadRequest, match="goes with relevance: cross_encoder") as wrong:
            create("extractive", options)
        assert wrong.value.param == "model"
    with pytest.raises(BadRequest, match="there is no folder"):
        create("extractive", {"relevance": "cross_encoder", "model": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match="cannot be loaded; name the folder of a sentence-transformers CrossEncoder"):
        CrossEncoder.load(str(tmp_path))
    prompt = prompt_of(" ".join(SENTENCES * 4), question=QUESTION)
    options = {"relevance": "cross_encoder", "model": str(tmp_path)}
    result = create("extractive", options).compress(prompt, context=context(question=QUESTION))
    assert result.prompt is prompt
    assert "extractive failed (ConfigError)" in result.note
