"""Content keys: equal exactly when model, salt and ids are."""

import hashlib
import struct

from hypothesis import given
from hypothesis import strategies as st
from promptsluice.kv_reuse import ChunkKey, KeySpace

IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8)
SPACE = st.builds(KeySpace, fingerprint=st.text(max_size=4), salt=st.text(max_size=4))


@given(SPACE, IDS, SPACE, IDS)
def test_keys_are_equal_exactly_when_everything_is(a: KeySpace, a_ids: list[int], b: KeySpace, b_ids: list[int]):
    assert (a.key(a_ids).digest == b.key(b_ids).digest) == ((a, a_ids) == (b, b_ids))


def test_model_and_salt_borders_do_not_blur():
    assert KeySpace("ab", "c").key([1]).digest != KeySpace("a", "bc").key([1]).digest


def test_the_digest_is_the_documented_one():
    raw = struct.pack("<IQ", 1, 2) + b"fp" + struct.pack("<Q", 4) + b"salt" + struct.pack("<3i", 7, 0, 300)
    expected = hashlib.blake2b(raw, digest_size=32, person=b"promptsluice-kv").hexdigest()
    assert KeySpace("fp", "salt").key((7, 0, 300)) == ChunkKey(expected, "fp", 3)
