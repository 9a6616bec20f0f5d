"""API keys of policy files: whose a key is, what it opens, and what is wrong with an entry."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from promptsluice.policies import PolicySet
from promptsluice.policies.keyring import (
    Keyring,
    may_use_collection,
    may_use_model,
    require_collection,
    require_model,
    require_policy,
    require_scope,
)
from promptsluice.policies.match import digest
from promptsluice.policies.schema import SCOPES, ApiKeySpec, LimitsSpec
from promptsluice.prompt import ConfigError, Forbidden, Unauthorized, UnknownModel

FILE = f"""
version: 1
default_policy: balanced
server:
  limits: {{requests_per_minute: 60, tokens_per_day: 1000}}
  api_keys:
    - {{name: free, sha256: {digest("free-key")}}}
    - name: narrow
      sha256: {digest("narrow-key").upper()}
      scopes: [inference, "collections:read"]
      models: ["gpt-*", local]
      policies: [lossless, off]
      collections: [handbook-*]
      expires: 2030-01-31
      limits: {{requests_per_minute: null, concurrent: 2}}
    - {{name: moved, env: KEYRING_TEST_KEY, expires: "2030-01-31T12:00:00+02:00"}}
backends:
  far: {{kind: openai, base_url: "http://127.0.0.1:9/v1", models: [gpt-5, local, secret-model]}}
routes: [{{match: {{api_key: narrow, model: local}}, policy: off}}]
"""


@pytest.fixture
def policies() -> PolicySet:
    return PolicySet.from_text(FILE)


def key(policies: PolicySet, name: str) -> ApiKeySpec:
    return next(entry for entry in policies.server.api_keys if entry.name == name)


def test_a_key_is_found_by_its_digest(policies: PolicySet, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [policies.keys.find(one) for one in (None, "", "free-kez", digest("free-key"), "\ud800")] == [None] * 5
    for secret, name in (("free-key", "free"), ("narrow-key", "narrow")):
        assert policies.keys.find(secret) == key(policies, name)
    assert policies.keys.find("moved-key") is None
    monkeypatch.setenv("KEYRING_TEST_KEY", "moved-key")
    assert policies.keys.find("moved-key") == key(policies, "moved")
    assert policies.keys.digests() == (digest("free-key"), digest("narrow-key"), digest("moved-key"))
    assert Keyring(()).find("x") is Keyring(()).authenticated("x") is None


def test_a_key_ends_with_its_last_day(policies: PolicySet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYRING_TEST_KEY", "moved-key")
    for secret, last, first in (
        ("narrow-key", datetime(2030, 1, 31, 23, 59, 59, tzinfo=UTC), datetime(2030, 2, 1, tzinfo=UTC)),
        ("moved-key", datetime(2030, 1, 31, 9, 59, 59, tzinfo=UTC), datetime(2030, 1, 31, 10, tzinfo=UTC)),
    ):
        assert policies.keys.authenticated(secret, now=last) is not None
        with pytest.raises(Unauthorized, match="expired on 2030-0") as expired:
            policies.keys.authenticated(secret, now=first)
        assert expired.value.code == "expired_api_key" and secret not in expired.value.message
    assert policies.keys.authenticated("free-key", now=datetime(9999, 1, 1, tzinfo=UTC)) is not None


def test_what_a_key_opens(policies: PolicySet) -> None:
    narrow, free = key(policies, "narrow"), key(policies, "free")
    assert {*free.scopes} == {*SCOPES} - {"metrics", "admin"}
    require_scope(narrow, "inference", what="POST /v1/chat/completions")
    with pytest.raises(Forbidden) as refused:
        require_scope(narrow, "collections:write", what="DELETE /v1/collections/x")
    assert refused.value.code == "scope_not_allowed"
    for part in ("DELETE /v1/collections/x", "'collections:write'", "'narrow'", "it has inference, collections:read"):
        assert part in refused.value.message
    assert [may_use_model(narrow, name) for name in ("gpt-5", "local", "secret-model", "a gpt-5")] == [1, 1, 0, 0]
    assert [may_use_collection(narrow, name) for name in ("handbook-1", "docs", "HANDBOOK-1")] == [1, 0, 0]
    for check, allowed in (
        (lambda: require_model(narrow, "secret-model"), "allowed: gpt-*, local"),
        (lambda: require_policy(narrow, "rag"), "allowed: lossless, off"),
        (lambda: require_collection(narrow, "docs", by=", which x asks"), "which x asks; allowed: handbook-*"),
        (lambda: require_collection(ApiKeySpec(name="a", env="A", collections=()), "docs"), "allowed: none"),
    ):
        with pytest.raises(Forbidden) as refused:
            check()
        assert allowed in refused.value.message
    for nobody in (None, free):
        require_model(nobody, "anything")
        require_policy(nobody, "anything")
        require_collection(nobody, "anything")


def test_which_policy_a_key_gets(policies: PolicySet) -> None:
    def chosen(model: str, secret: str, **headers: str) -> tuple[str, str]:
        found = policies.resolve(model, api_key=secret, headers=headers)
        return found.policy_name, found.reason

    assert chosen("gpt-5", "free-key") == ("balanced", "default_policy")
    assert chosen("gpt-5", "narrow-key") == ("lossless", "the first of API key 'narrow'")
    assert chosen("local", "narrow-key") == ("off", "route 1")
    assert chosen("gpt-5:off", "narrow-key")[0] == "off"
    assert chosen("gpt-5:balanced", "free-key")[0] == "balanced"
    with pytest.raises(Forbidden, match="policy 'balanced' may not be chosen here; allowed: lossless, off"):
        policies.resolve("gpt-5:balanced", api_key="narrow-key")
    with pytest.raises(Forbidden, match="may not use the model 'secret-model'"):
        policies.resolve("secret-model", api_key="narrow-key")
    with pytest.raises(UnknownModel) as unknown:
        policies.resolve("gpt-9", api_key="narrow-key")
    assert "gpt-5, local" in unknown.value.message and "secret-model" not in unknown.value.message


def test_limits_of_a_key_stand_over_those_of_all(policies: PolicySet) -> None:
    everybody = policies.server.limits
    assert key(policies, "free").limits_over(everybody) == everybody
    own = LimitsSpec(requests_per_minute=None, concurrent=2, tokens_per_day=1000)
    assert key(policies, "narrow").limits_over(everybody) == own


KEY = f"sha256: {digest('x')}"


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ("scopes: [inference, everything]", "scopes"),
        ("scopes: []", "scopes"),
        ("models: []", "models"),
        ("policies: [nosuch]", "unknown policy 'nosuch'"),
        ("expires: 2030-13-01", "must be a day"),
        ("expires: 2030-01-01T00:00:00", "with its zone"),
        ("expires: 9999-12-31", "must be a day"),
        ("expires: 7", "expires"),
        ("limits: {requests_per_minute: 0}", "requests_per_minute"),
        ("limits: {tokens: 7}", "unknown key 'tokens'"),
        ("limits: {concurrent: 1.5}", "whole number"),
    ],
)
def test_what_is_wrong_with_an_entry_is_said_with_its_line(entry: str, complaint: str) -> None:
    text = f"version: 1\nserver:\n  api_keys:\n    - name: a\n      {KEY}\n      {entry}\n"
    with pytest.raises(ConfigError, match=rf":6: .*{complaint}"):
        PolicySet.from_text(text)


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        (f"[{{name: a, {KEY}}}, {{name: b, {KEY}}}]", "the key of 'b' is given twice"),
        (f"[{{name: a, {KEY}}}, {{name: a, env: B}}]", "name 'a' is given twice"),
        ("[{name: {a: b}, sha256: [1]}, {name: {a: b}, sha256: [1]}, 7]", "must be a text"),
    ],
)
def test_keys_stand_once(keys: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        PolicySet.from_text(f"version: 1\nserver: {{api_keys: {keys}}}")


@pytest.mark.parametrize(
    "counters", ["{url: 'http://x'}", "{url: 'redis://u:p@x'}", "{url: 'redis://x', fail: maybe}", "{fail: open}"]
)
def test_counters_that_cannot_be(counters: str) -> None:
    with pytest.raises(ConfigError):
        PolicySet.from_text(f"version: 1\nserver: {{counters: {counters}}}")


def test_the_counters_password_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "version: 1\nserver:\n  counters:\n    url: redis://x\n    password_env: COUNTERS_TEST_PASSWORD\n"
    policies: Any = PolicySet.from_text(text)
    with pytest.raises(ConfigError, match="5: environment variable COUNTERS_TEST_PASSWORD is not set"):
        policies.counters_password()
    assert [problem.line for problem in policies.unset_environment()] == [5]
    monkeypatch.setenv("COUNTERS_TEST_PASSWORD", "hush")
    assert policies.counters_password() == "hush"
    assert PolicySet.default().counters_password() is None


def test_the_example_for_several_teams() -> None:
    file = Path(__file__).parents[2] / "examples" / "policies" / "tenants.yaml"
    policies = PolicySet.load(file)
    trial = key(policies, "trial").limits_over(policies.server.limits)
    assert (trial.requests_per_minute, trial.tokens_per_minute, trial.concurrent) == (10, 200_000, 2)
    assert key(policies, "librarian").limits_over(policies.server.limits).tokens_per_minute is None
    assert key(policies, "prometheus").scopes == ("metrics",)
