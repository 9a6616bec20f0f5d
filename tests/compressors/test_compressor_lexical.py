"""Relevance by shared words: terms of every script, BM25 against its formula, vectors that tell texts apart."""

import math
import os
import subprocess
import sys
import tracemalloc
import unicodedata
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from promptsluice.compressors import CompressionContext, create
from promptsluice.compressors.lexical import Words, shared_with, terms
from promptsluice.compressors.mmr import normalized
from promptsluice.compressors.nearness import nearness
from promptsluice.prompt import Prompt

Make = Callable[..., CompressionContext]
PromptOf = Callable[..., Prompt]
TextsOf = Callable[[Prompt], list[str]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The valves were LEAKING", ["the", "valv", "wer", "leak"]),
        ("Ada's refund, refunded", ["ada", "refund", "refund"]),
        ("its gas is red", ["its", "gas", "is", "red"]),
        ("ﬁrst Ｖａｌｖｅ", ["first", "valv"]),
        ("退款需要", ["退款", "款需", "需要"]),
        ("款", ["款"]),
        ("カフェA1で", ["カフ", "フェ", "a1", "で"]),
        ("Größe größen", ["grösse", "grössen"]),
        ("snake_case-7", ["snak", "cas", "7"]),
        ("the mayor’s house, Zoë's", ["the", "mayor", "hous", "zoë"]),
        ("isn’t it ʼtis п’ять", ["isn't", "it", "tis", "п'ять"]),
        ("L’incendie, l'eau d’Évian, dell’acqua", ["incendi", "eau", "évian", "acqua"]),
        ("qu’elle s'il l’or c't", ["ell", "s'il", "l'or", "c't"]),
        ("हिन्दी পুলের தமிழ் සිංහල", ["हिन्दी", "পুলের", "தமிழ்", "සිංහල"]),
        ("كِتَابٌ שָׁלוֹם", ["كتاب", "שלום"]),
        ("สะพานนี้ မြန်မာ", ["สะ", "ะพ", "พา", "าน", "นนี้", "မြန်", "န်မာ"]),
        ("1\ufe0f\u20e3 葛\U000e0100城", ["1", "葛城"]),
        ("", []),
        ("🙂 — !", []),
    ],
)
def test_terms(text: str, expected: list[str]) -> None:
    assert terms(text) == expected


def test_what_texts_tell_of_a_question() -> None:
    words = Words(["A cat sat.", "A dog sat.", "Nobody came."])
    cat, dog, nobody = words.told("Where does the cat sit, where sat the elephant?")
    once, twice = words.idf("cat"), words.idf("sat")
    everything = 3 * once + twice  # "sit" and "elephant" count as words that come once
    assert cat == pytest.approx((once + twice) / everything)
    assert dog == pytest.approx(twice / everything) and nobody == 0.0
    assert words.told("cat").tolist() == [1.0, 0.0, 0.0]
    assert words.told("cat " + " ".join(f"w{n}" for n in range(100)))[0] == pytest.approx(1 / 12)
    assert not words.told("Who is it?").any() and Words([]).told("cat").shape == (0,)


def test_what_texts_tell_of_a_long_question_takes_no_table_of_both() -> None:
    asked = " ".join(f"w{n}" for n in range(500))
    words = Words(f"w{n} and other things" for n in range(2000))
    tracemalloc.start()
    told = words.told(asked)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert told[:500] == pytest.approx([1 / 12] * 500) and not told[500:].any()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    ("asked", "once", "twice"), [(4, 1.0, 1.0), (6, 1.0, 0.003), (7, 0.458, 0.001), (8, 0.054, 0.0), (10, 0.0015, 0.0)]
)
def test_one_shared_word_makes_a_sentence_near_by_how_many_are_asked(asked: int, once: float, twice: float) -> None:
    question = "castle " + " ".join(f"w{n}" for n in range(asked - 1))

    def nearest(text: str) -> float:
        (one,) = nearness([text], question, whole=[()], expired=lambda: False)
        return float(one.scores.max())

    assert nearest("A castle stands. Cats sleep. Dogs bark. Children play.") == pytest.approx(once, abs=1e-3)
    assert nearest("A castle stands. Castle cats sleep. Dogs bark. Children play.") == pytest.approx(twice, abs=1e-3)


texts = st.lists(st.text(st.sampled_from("ab c退款é1 "), max_size=30), min_size=1, max_size=8)


@pytest.mark.slow
@given(texts, st.text(st.sampled_from("ab c退款é1 "), max_size=12))
def test_bm25_is_its_formula(found: list[str], question: str) -> None:
    bags = [Counter(terms(text)) for text in found]
    sizes = [bag.total() for bag in bags]
    average = max(1.0, sum(sizes) / len(sizes))
    expected = []
    for bag, size in zip(bags, sizes, strict=True):
        score = 0.0
        for term in set(terms(question)):
            count = sum(term in other for other in bags)
            if count:
                idf = math.log(1 + (len(bags) - count + 0.5) / (count + 0.5))
                score += idf * bag[term] * 2.2 / (bag[term] + 1.2 * (0.25 + 0.75 * size / average))
        expected.append(score)
    np.testing.assert_allclose(Words(found).bm25(question), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@given(texts)
def test_equal_bags_are_equal_and_known_is_a_share(found: list[str]) -> None:
    words = Words([*found, found[0]])
    vectors = words.vectors()
    np.testing.assert_array_equal(vectors[0], vectors[-1])
    assert np.isfinite(normalized(vectors)).all()
    assert 0.0 <= words.known("a b 退款 zzz") <= 1.0
    asked = f"{found[0]} unseen"
    assert words.known(asked) < 1.0
    assert words.known("unseen") == 0.0


def test_a_question_in_other_words_is_not_known() -> None:
    words = Words(["The refund arrives in one week.", "The garden is green."])
    assert words.known("When does the refund arrive?") > 0.2 > words.known("Wann kommt mein Geld?")


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ("ボートはどこですか", "今日はいい天気です。これは本です。"),
        ("船是什么时候的", "什么时候是他的"),
        ("أين في من", "كان الطقس جميلا في المدينة من أمس"),
        ("где был в", "он был в городе"),
        ("Wer ist das?", "Das ist ein Haus"),
        ("Why doesn't it, and I'm sure they've won’t?", "It doesn’t, I'm sorry, they've, won't."),
        ("Qu’est-ce que c'est, s'il est là, j’ai", "C’est, qu'est, s’il, j'ai"),
    ],
)
def test_stop_words_of_other_scripts_answer_nothing(question: str, text: str) -> None:
    assert Words([text]).bm25(question, stop_words=False).tolist() == [0.0]
    assert shared_with(question)(text) == frozenset()


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ("Où est le café fermé?", unicodedata.normalize("NFD", "Le café était fermé.")),
        (unicodedata.normalize("NFD", "Überlastung"), "Grund war eine Überlastung."),
        ("API key", "ＡＰＩ　ｋｅｙ"),
    ],
)
def test_words_are_shared_in_every_form_of_their_characters(question: str, text: str) -> None:
    assert shared_with(question)(text) == frozenset(terms(question)) & frozenset(terms(text)) - {"le"} != frozenset()


def test_words_of_other_scripts_answer() -> None:
    assert Words(["ボートは赤い", "猫は寝る"]).bm25("ボートの色は何ですか", stop_words=False).argmax() == 0
    assert Words(["猫在睡觉", "船票很贵"]).bm25("船票多少钱", stop_words=False).argmax() == 1
    assert Words(["القط نائم", "القارب في الميناء"]).bm25("أين القارب", stop_words=False).argmax() == 1
    assert shared_with("Who sold Anna's boats?")("Anna sold the boat.") == {"anna", "boat", "sold"}


def test_words_that_an_apostrophe_or_a_sign_for_a_vowel_stands_in_answer() -> None:
    assert shared_with("What happened to the mayor?")("The mayor’s house burnt.") == {"mayor"}
    assert shared_with("Où commença cet incendie?")("L’incendie dura un jour.") == {"incendi"}
    assert shared_with("मुंबई का पुल")("कुत्ता भौंकता है।") == frozenset(), "no word, though vowels and consonants"
    assert shared_with("कौन सा पुल?")("वह पुल।") == {"पुल"}
    assert shared_with("كتاب")("هذا كِتَابٌ") == {"كتاب"} == shared_with("كِتَاب")("كتاب")


@pytest.mark.slow
def test_vectors_are_the_same_under_every_hash_seed() -> None:
    code = (
        "from promptsluice.compressors.lexical import Words;"
        "print(Words(['a b c', 'c refund d']).vectors().sum(0).tolist())"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


def test_counting_words_ends_when_time_is_over() -> None:
    """A long text is given up halfway; those before it count."""
    looks = 0

    def expired() -> bool:
        nonlocal looks
        looks += 1
        return looks > 3

    words = Words(["refund week", "garden", "word " * 1_000_000, "refund"], expired=expired)
    assert looks == 4
    assert words.bm25("refund").shape == (2,)
    assert words.vectors().shape[0] == 2
    assert Words([], expired=lambda: True).bm25("refund").shape == (0,)


def test_sentences_that_were_not_counted_in_time_stay(context: Make, prompt_of: PromptOf, tool_texts: TextsOf) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.001
        return now

    text = " ".join(f"Sentence {'abcdefghij'[n % 10]} speaks of gardens and rivers." for n in range(400))
    result = create("extractive", {"relevance": "words"}).compress(
        prompt_of(text, question="What of rivers?"),
        context=context(question="What of rivers?", deadline=0.5, clock=clock),
    )
    assert "sentences judged, the rest kept" in result.note
    assert tool_texts(result.prompt)[0].endswith("Sentence j speaks of gardens and rivers.")
    assert result.rate < 1.0
