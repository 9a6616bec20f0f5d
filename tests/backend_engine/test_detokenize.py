"""Incremental text: whole characters, stop strings across token borders, nothing lost at the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from promptsluice.backend_engine.detokenize import Detokenizer, StopMatcher, TextDecoder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.decoders import DecodeStream

TEXT = "the end. Das Ende; 你好，世界 \N{WAVING HAND SIGN} naïve. "


class ByteDecoder:
    """A byte-level tokenizer of a few merges, in the shape that the engine expects."""

    def __init__(self) -> None:
        self.backend = Tokenizer(models.BPE())
        self.backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=280, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
        )
        self.backend.train_from_iterator([TEXT] * 5, trainer)

    def stream(self) -> "ByteStream":
        return ByteStream(self.backend)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def ids(self, text: str) -> list[int]:
        return self.backend.encode(text).ids


class ByteStream:
    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token_id: int) -> str:
        return self._stream.step(self._backend, token_id) or ""


@pytest.fixture(scope="module")
def decoder() -> ByteDecoder:
    return ByteDecoder()


def shown(decoder: ByteDecoder, ids: list[int], *stops: str) -> tuple[list[str], bool]:
    """The pieces of text, and whether a stop string ended it."""
    detokenizer, pieces = Detokenizer(decoder, stops=stops), list[str]()
    for token in ids:
        text, stopped = detokenizer.push(token)
        pieces.append(text)
        if stopped:
            return pieces, True
    return [*pieces, detokenizer.flush()], False


def test_pieces_are_whole_characters_and_together_the_text(decoder: ByteDecoder) -> None:
    pieces, _ = shown(decoder, decoder.ids(TEXT))
    assert "".join(pieces) == TEXT
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.parametrize("cut", range(1, 40))
def test_an_output_cut_off_in_a_character_ends_before_it(decoder: ByteDecoder, cut: int) -> None:
    text = "".join(shown(decoder, decoder.ids(TEXT)[:cut])[0])
    assert TEXT.startswith(text)
    assert len(text.encode()) >= len(
        decoder.decode(decoder.ids(TEXT)[:cut]).rstrip("\N{REPLACEMENT CHARACTER}").encode()
    )


def test_special_tokens_are_not_text(decoder: ByteDecoder) -> None:
    end = decoder.backend.token_to_id("<end>")
    assert end is not None
    assert "".join(shown(decoder, [*decoder.ids("the end"), end])[0]) == "the end"


@pytest.mark.parametrize("stop", ["end", "Ende;", "世界", "e", "naïve. ", ". Das Ende; 你"])
def test_text_ends_before_the_stop_string(decoder: ByteDecoder, stop: str) -> None:
    pieces, stopped = shown(decoder, decoder.ids(TEXT), stop)
    assert stopped and "".join(pieces) == TEXT[: TEXT.index(stop)]


def test_what_only_began_a_stop_string_is_shown_in_the_end(decoder: ByteDecoder) -> None:
    pieces, stopped = shown(decoder, decoder.ids(TEXT), "naïve. never")
    assert not stopped and "".join(pieces) == TEXT
    assert "".join(pieces[:-1]) == TEXT.removesuffix("naïve. ")


def _one_by_one(text: str, stops: list[str]) -> tuple[str, bool]:
    """The rule: reading character by character, the first time a stop string is complete, the longest one counts."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_the_cut_does_not_depend_on_how_the_text_arrives(text: str, stops: list[str], data: st.DataObject) -> None:
    matcher, out, stopped, place = StopMatcher(stops), "", False, 0
    while place < len(text) and not stopped:
        size = data.draw(st.integers(1, len(text) - place))
        piece, stopped = matcher.push(text[place : place + size])
        out, place = out + piece, place + size
        assert _one_by_one(text, stops)[0].startswith(out), "something was shown that a stop string takes back"
    out += "" if stopped else matcher.flush()
    assert (out, stopped) == _one_by_one(text, stops)


def test_no_stop_string_is_looked_for_among_the_first_tokens(decoder: ByteDecoder) -> None:
    ids, first = decoder.ids("end end end"), len(decoder.ids("end"))
    detokenizer, text = Detokenizer(decoder, stops=("end",), unstopped=first), ""
    for token in ids:
        piece, stopped = detokenizer.push(token)
        text += piece
        if stopped:
            break
    assert text == "end ", "the first one came too early"
    short = Detokenizer(decoder, stops=("end",), unstopped=len(ids))
    assert "".join(short.push(token)[0] for token in ids) + short.flush() == "end end end"


def continued(decoder: TextDecoder, ids: list[int], first: int) -> str:
    """The text of `ids` from the `first` one on, decoded behind some of those before it."""
    detokenizer = Detokenizer(decoder, after=ids[max(0, first - 8) : first])
    return "".join(detokenizer.push(token)[0] for token in ids[first:]) + detokenizer.flush()


def test_a_text_goes_on_behind_another(decoder: ByteDecoder) -> None:
    ids = decoder.ids(TEXT * 2)
    for first in range(len(ids) + 1):
        before = decoder.decode(ids[:first])
        if not before.endswith("\N{REPLACEMENT CHARACTER}"):
            assert continued(decoder, ids, first) == (TEXT * 2)[len(before) :]


class SpaceDroppingDecoder(ByteDecoder):
    """Writes a space as SentencePiece does, and drops the one that a text begins with."""

    def __init__(self) -> None:
        self.backend = Tokenizer(models.WordLevel({"\u2581Paris": 0, "\u2581is": 1, "?": 2}, unk_token="?"))
        self.backend.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )


def test_a_continued_text_keeps_its_first_space() -> None:
    decoder = SpaceDroppingDecoder()
    assert continued(decoder, [0, 1, 0], 0) == "Paris is Paris"
    assert continued(decoder, [0, 1, 0], 1) == " is Paris"
    assert continued(decoder, [0, 1, 0], 2) == " Paris"
