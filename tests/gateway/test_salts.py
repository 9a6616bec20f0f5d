"""Whose stored chunks are whose: by the policy file and the API key, never by what a client says."""

import hashlib
import threading
from asyncio import to_thread
from pathlib import Path

import pytest
from promptsluice.gateway.backends.registry import backends_of
from promptsluice.gateway.caller import Caller
from promptsluice.gateway.house import Sluice
from promptsluice.gateway.keys.counters import MemoryCounters
from promptsluice.gateway.metrics import Metrics
from promptsluice.gateway.rooms import Rooms
from promptsluice.gateway.salts import Salts
from promptsluice.policies import PolicySet
from promptsluice.prompt import ModelUnavailable

from .harness import PATIENCE_S

KEYED = """
version: 1
server: {api_keys: [{name: a, sha256: %s}, {name: b, env: PROMPTSLUICE_TEST_KEY}]}
collections: {public: ["handbook*"]}
"""


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_without_api_keys_collections_are_public_and_what_clients_send_is_not() -> None:
    salts = Salts.of(PolicySet.default())
    one, two = Caller(request_id="1", api_key="one").tenant, Caller(request_id="2", api_key="two").tenant
    assert salts.retrieved("docs", tenant=one) == salts.retrieved("docs", tenant=two) == salts.ingested("docs")
    assert salts.tenant(one) != salts.tenant(two) != salts.tenant("")


def test_with_api_keys_only_the_collections_that_the_file_names_are_public() -> None:
    salts = Salts.of(PolicySet.from_text(KEYED % digest("secret")))
    assert salts.retrieved("handbook-de", tenant="x") == salts.ingested("handbook-de")
    assert salts.ingested("handbook-de") != salts.ingested("handbook")
    assert salts.ingested("private") is None
    assert salts.retrieved("private", tenant="x") == salts.tenant("x") != salts.retrieved("private", tenant="y")


def test_no_tenant_and_no_collection_can_take_anothers_salt() -> None:
    salts = Salts()
    assert salts.tenant("collection:docs") != salts.ingested("docs") and salts.ingested("tenant:x") != salts.tenant("x")


def test_a_deleted_document_is_forgotten_for_every_known_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMPTSLUICE_TEST_KEY", "other")
    salts = Salts.of(PolicySet.from_text(KEYED % digest("secret")))
    tenants = [Caller(request_id="", api_key=key).tenant for key in ("secret", "other", None)]
    assert set(salts.everywhere("c")) == {"collection:c", *(salts.tenant(tenant) for tenant in tenants)}


class Asked(Rooms):
    """Says when a backend asks for its model, which it does only to compute something."""

    def __init__(self, policy_set: PolicySet) -> None:
        super().__init__(policy_set)
        self.asked = threading.Event()

    def model_path(self, name: str) -> Path:
        self.asked.set()
        raise ModelUnavailable(f"{name} is not here")


async def test_a_backend_that_outlives_its_policy_file_keeps_to_the_salts_of_the_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PROMPTSLUICE_TEST_KEY", "other")
    keyed = PolicySet.from_text(KEYED % digest("secret"))
    rooms = Asked(keyed)
    house = Sluice(keyed, rooms=rooms, backends=backends_of(keyed, rooms), metrics=Metrics(), counters=MemoryCounters())
    assert rooms.salts().ingested("private") is None
    successor = await house.rewired(PolicySet.default(), given={})
    (kept,) = successor.backends.values()
    assert kept in house.backends.values()
    kept.warm(["a text"], collection="private")  # public now, so that it is computed ahead
    assert await to_thread(rooms.asked.wait, PATIENCE_S)
    third = await successor.rewired(keyed, given={})
    assert rooms.salts().ingested("private") is None and kept in third.backends.values()
    await third.close()
