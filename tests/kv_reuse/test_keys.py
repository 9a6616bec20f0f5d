"""Content keys: equal exactly when model, salt and ids are."""

import hashlib
import struct

from hypothesis import given
from hypothesis import strategies as st
from promptsluice.kv_reuse import ChunkKey, KeySpace

IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8)
SPACE = st.builds(KeySpace, fingerprint=st.text(max_size=4), salt=st.text(max_size=4))


ANCHORS = st.lists(st.integers(0, 2**31 - 1), max_size=4)


@given(SPACE, IDS, ANCHORS, SPACE, IDS, ANCHORS)
def test_keys_are_equal_exactly_when_everything_is(
    a: KeySpace, a_ids: list[int], a_anchor: list[int], b: KeySpace, b_ids: list[int], b_anchor: list[int]
):
    one, two = a.key(a_ids, anchor=a_anchor), b.key(b_ids, anchor=b_anchor)
    assert (one.digest == two.digest) == ((a, a_ids) == (b, b_ids))
    assert (one.name == two.name) == ((a, a_ids, a_anchor) == (b, b_ids, b_anchor))


def test_model_and_salt_borders_do_not_blur():
    assert KeySpace("ab", "c").key([1]).digest != KeySpace("a", "bc").key([1]).digest


def test_an_anchor_is_not_a_part_of_the_chunk():
    space = KeySpace("model")
    assert len({space.key(ids, anchor=anchor).name for ids, anchor in [([1, 2], []), ([2], [1]), ([1], [2])]}) == 3


def test_the_digest_is_the_documented_one():
    def documented(ids: str) -> str:
        raw = struct.pack("<IQ", 3, 2) + b"fp" + struct.pack("<Q", 4) + b"salt" + bytes.fromhex(ids)
        return hashlib.blake2b(raw, digest_size=32, person=b"promptsluice-kv").hexdigest()

    chunk, anchor = documented("07000000 00000000 2c010000"), documented("09000000")
    assert KeySpace("fp", "salt").key((7, 0, 300)) == ChunkKey(chunk, "fp", 3)
    key = KeySpace("fp", "salt").key((7, 0, 300), anchor=(9,))
    assert key == ChunkKey(chunk, "fp", 3, anchor) and key.name == f"{chunk}-{anchor}"
