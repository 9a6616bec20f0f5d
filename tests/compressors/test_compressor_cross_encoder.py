"""Units chosen by a cross-encoder from a folder: its order counts, time is kept, and folders are checked."""

import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from promptsluice.compressors import CompressionContext, Compressor, create
from promptsluice.compressors.cross_encoder import CrossEncoder, cross_encoder
from promptsluice.compressors.relevance import by_order
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


@pytest.mark.slow
def test_nobody_waits_longer_than_there_is_time(
    folder: Path, tmp_path: Path, context: Make, prompt_of: PromptOf
) -> None:
    fresh = str(shutil.copytree(folder, tmp_path / "fresh"))
    assert cross_encoder(fresh, seconds=0.0) is None, "it is being loaded"
    model = cross_encoder(fresh, seconds=math.inf)
    assert model is not None
    prompt = prompt_of(" ".join(SENTENCES * 4), question=QUESTION)
    compressor = create("extractive", {"relevance": "cross_encoder", "model": fresh})
    with model.turn(math.inf) as mine, model.turn(0.0) as other:
        assert (mine, other) == (True, False)
        result = compressor.compress(prompt, context=context(question=QUESTION, deadline=time.monotonic() + 0.5))
    assert result.prompt is prompt
    assert "0 of 40 sentences judged" in result.note or "deadline reached" in result.note
    assert compressor.compress(prompt, context=context(question=QUESTION)).rate < 0.8


def test_what_could_not_be_loaded_is_not_tried_again(folder: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for _ in range(2):
        with pytest.raises(ConfigError, match="cannot be loaded"):
            cross_encoder(str(damaged), seconds=math.inf)
        shutil.copytree(folder, damaged, dirs_exist_ok=True)


def test_what_has_no_score_is_the_worst() -> None:
    scores = np.array([-3.0, math.nan, -1.0, math.inf, -2.0], dtype=np.float32)
    assert by_order(scores).tolist() == [0.0, 0.0, 1.0, 0.0, 0.5]
    assert by_order(np.full(2, math.nan, dtype=np.float32)).tolist() == [0.0, 0.0]


@pytest.fixture
def model(folder: Path) -> CrossEncoder:
    found = cross_encoder(str(folder), seconds=math.inf)
    assert found is not None
    return found


def judged_by(
    scores: Callable[[list[str]], object], model: CrossEncoder, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> Compressor:
    """The compressor with a model whose answers are these."""

    def predict(pairs: list[tuple[str, str]], **_: Any) -> object:
        return scores([text for _, text in pairs])

    monkeypatch.setattr(model._model, "predict", predict)
    options = {"relevance": "cross_encoder", "model": str(folder), "redundancy": 0.0, "kinds": ["tool_result"]}
    return create("extractive", options)


@pytest.mark.slow
def test_one_very_long_passage_and_none(model: CrossEncoder, folder: Path, context: Make, prompt_of: PromptOf) -> None:
    assert model.scores(QUESTION, []).shape == (0,)
    assert np.isfinite(model.scores(QUESTION, ["", "The fox sees " * 20_000])).all()
    compressor = create("extractive", {"relevance": "cross_encoder", "model": str(folder), "min_tokens": 1})
    endless = prompt_of("meadow " * 20_000, question=QUESTION)
    result = compressor.compress(endless, context=context(question=QUESTION))
    assert "failed" not in result.note and 0.45 <= result.rate <= 0.5
    for text in ("", " \n ", "One."):
        prompt = prompt_of(text, question=QUESTION)
        assert compressor.compress(prompt, context=context(question=QUESTION)).prompt is prompt


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_sentences_without_a_score_go_first(
    bad: float,
    model: CrossEncoder,
    folder: Path,
    context: Make,
    prompt_of: PromptOf,
    tool_texts: TextsOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def scores(texts: list[str]) -> object:
        return [bad if "the" in text and "owl" in text else float(len(texts) - i) for i, text in enumerate(texts)]

    compressor = judged_by(scores, model, monkeypatch, folder)
    prompt = prompt_of(" ".join(SENTENCES), question=QUESTION)
    result = compressor.compress(prompt, context=context(question=QUESTION))
    (short,) = tool_texts(result.prompt)
    assert "failed" not in result.note and result.rate <= 0.5
    assert SENTENCES[0] in short and "owl" not in short


def test_scores_that_are_all_the_same_or_none_keep_the_first(
    model: CrossEncoder,
    folder: Path,
    context: Make,
    prompt_of: PromptOf,
    tool_texts: TextsOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = prompt_of(" ".join(SENTENCES), question=QUESTION)
    for value in (0.0, math.nan):
        compressor = judged_by(lambda texts, value=value: [value] * len(texts), model, monkeypatch, folder)
        result = compressor.compress(prompt, context=context(question=QUESTION))
        assert tool_texts(result.prompt)[0].startswith(SENTENCES[0])
        assert "failed" not in result.note and 0.3 < result.rate <= 0.5


def test_a_model_that_fails_leaves_the_text_and_its_turn_to_others(
    model: CrossEncoder, folder: Path, context: Make, prompt_of: PromptOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scores(texts: list[str]) -> object:
        raise RuntimeError("CUDA error: out of memory")

    compressor = judged_by(scores, model, monkeypatch, folder)
    prompt = prompt_of(" ".join(SENTENCES), question=QUESTION)
    for _ in range(2):
        result = compressor.compress(prompt, context=context(question=QUESTION))
        assert result.prompt is prompt
        assert "extractive failed (RuntimeError)" in result.note and "CUDA" not in result.note
    with model.turn(0.0) as free:
        assert free, "who fails keeps nobody waiting"


def test_a_model_that_gives_too_few_scores_is_a_failure(
    model: CrossEncoder, folder: Path, context: Make, prompt_of: PromptOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    compressor = judged_by(lambda texts: [1.0] * (len(texts) - 1), model, monkeypatch, folder)
    prompt = prompt_of(" ".join(SENTENCES), question=QUESTION)
    result = compressor.compress(prompt, context=context(question=QUESTION))
    assert result.prompt is prompt
    assert "extractive failed" in result.note


def test_folders_are_checked(folder: Path, tmp_path: Path, context: Make, prompt_of: PromptOf) -> None:
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
    with pytest.raises(BadRequest, match=r"there is no config\.json in"):
        create("extractive", options)
    (tmp_path / "config.json").write_text("{}")
    result = create("extractive", options).compress(prompt, context=context(question=QUESTION))
    assert result.prompt is prompt
    assert "extractive failed (ConfigError)" in result.note
