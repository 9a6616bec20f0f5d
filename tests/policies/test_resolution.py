"""Which policy and which backend a request gets, and who may choose."""

import hashlib

import pytest
from promptsluice.policies import PolicySet
from promptsluice.prompt import ConfigError, Forbidden, Unauthorized, UnknownModel, UnknownPolicy

FILE = f"""
version: 1
default_policy: balanced
server:
  api_keys:
  - {{name: search, sha256: {hashlib.sha256(b"search-key").hexdigest()}}}
  - {{name: night, env: NIGHT_KEY}}
backends:
  local: {{kind: embedded, model: smollm2-135m-instruct}}
  disk: {{kind: embedded, model: /models/tiny, context_limit: 100}}
  listed: {{kind: openai, base_url: "http://h/v1", api_key_env: LISTED_KEY, models: ["llama3:8b", org/qwen, "x:rag"]}}
policies:
  balanced: {{extends: balanced, allow_client_policy: all}}
  closed: {{extends: lossless, allow_client_policy: none}}
  narrow: {{extends: lossless, allow_client_policy: [off]}}
  spare: {{}}
routes:
- match: {{header: {{X-Team: "sea*"}}}}
  policy: closed
- match: {{model: "org/*", prompt_tokens: {{min: 100, max: 200}}}}
  policy: narrow
- match: {{api_key: search}}
  policy: aggressive
- match: {{api_key_sha256: {hashlib.sha256(b"other").hexdigest().upper()}}}
  policy: spare
- match: {{model: "made-up-*"}}
  backend: local
"""
CATCH_ALL = "  any: {kind: openai, base_url: 'http://any/v1'}\n"


@pytest.fixture
def policies() -> PolicySet:
    return PolicySet.from_text(FILE)


@pytest.fixture
def open_policies() -> PolicySet:
    return PolicySet.from_text(FILE.replace("policies:\n", CATCH_ALL + "policies:\n", 1))


def test_the_default(policies: PolicySet) -> None:
    found = policies.resolve("smollm2-135m-instruct")
    assert (found.model, found.backend, found.policy_name) == ("smollm2-135m-instruct", "local", "balanced")
    assert found.reason == "default_policy"
    assert found.policy == policies.policy("balanced")


@pytest.mark.parametrize(
    ("model", "base", "policy", "backend"),
    [
        ("smollm2-135m-instruct:off", "smollm2-135m-instruct", "off", "local"),
        ("tiny:rag", "tiny", "rag", "disk"),
        ("llama3:8b", "llama3:8b", "balanced", "listed"),
        ("llama3:8b:aggressive", "llama3:8b", "aggressive", "listed"),
        ("x:rag", "x:rag", "balanced", "listed"),
        ("x:rag:off", "x:rag", "off", "listed"),
        ("org/qwen:spare", "org/qwen", "spare", "listed"),
    ],
)
def test_the_model_suffix(policies: PolicySet, model: str, base: str, policy: str, backend: str) -> None:
    found = policies.resolve(model)
    assert (found.model, found.policy_name, found.backend) == (base, policy, backend)


def test_an_unlisted_model_goes_to_the_upstream_without_a_list(open_policies: PolicySet) -> None:
    assert open_policies.resolve("mistral:7b").model == "mistral:7b"
    found = open_policies.resolve("mistral:7b:lossless")
    assert (found.model, found.backend, found.policy_name) == ("mistral:7b", "any", "lossless")
    assert open_policies.resolve("smollm2-135m-instruct").backend == "local"


def test_an_unknown_suffix_of_a_known_model_lists_the_policies(policies: PolicySet) -> None:
    with pytest.raises(UnknownPolicy, match=r"'blanced'.*balanced.*off") as caught:
        policies.resolve("smollm2-135m-instruct:blanced")
    assert caught.value.to_wire()["error"]["code"] == "policy_not_found"


@pytest.mark.parametrize("model", ["gpt-4", "gpt-4:8b", ":off", "smollm2", "smollm2:"])
def test_an_unknown_model_lists_the_models(policies: PolicySet, model: str) -> None:
    with pytest.raises(UnknownModel, match=r"smollm2-135m-instruct, tiny, llama3:8b, org/qwen") as caught:
        policies.resolve(model)
    assert caught.value.status == 404


def test_the_header_comes_before_the_suffix(policies: PolicySet) -> None:
    found = policies.resolve("tiny:off", headers={"X-PromptSluice-Policy": " rag "})
    assert (found.model, found.policy_name, found.reason) == ("tiny", "rag", "header x-promptsluice-policy")
    with pytest.raises(UnknownPolicy):
        policies.resolve("tiny", headers={"x-promptsluice-policy": "nope"})
    assert policies.resolve("tiny:off", headers={"x-promptsluice-policy": ""}).policy_name == "off"


def test_the_first_matching_route_wins(policies: PolicySet) -> None:
    by_header = policies.resolve("tiny", headers={"x-team": "search"}, api_key="search-key")
    assert (by_header.policy_name, by_header.route, by_header.reason) == ("closed", 0, "route 1")
    by_key = policies.resolve("tiny", headers={"x-team": "ads"}, api_key="search-key")
    assert (by_key.policy_name, by_key.key_name) == ("aggressive", "search")
    assert policies.resolve("tiny", api_key="other").policy_name == "spare"


@pytest.mark.parametrize(("tokens", "policy"), [(99, "balanced"), (100, "narrow"), (200, "narrow"), (201, "balanced")])
def test_routes_by_size(policies: PolicySet, tokens: int, policy: str) -> None:
    assert policies.resolve("org/qwen", prompt_tokens=tokens).policy_name == policy


def test_the_prompt_is_counted_only_when_a_route_needs_it(policies: PolicySet) -> None:
    asked: list[str] = []

    def count() -> int:
        asked.append("count")
        return 150

    policies.resolve("tiny", prompt_tokens=count)
    assert not asked
    assert policies.resolve("org/qwen", prompt_tokens=count).policy_name == "narrow"
    assert asked == ["count"]


def test_a_route_may_choose_the_backend_only(policies: PolicySet) -> None:
    found = policies.resolve("made-up-7")
    assert (found.model, found.backend, found.policy_name) == ("made-up-7", "local", "balanced")


def test_clients_choose_only_what_they_may(policies: PolicySet) -> None:
    team = {"x-team": "sea"}
    with pytest.raises(Forbidden, match="allowed: closed"):
        policies.resolve("tiny:off", headers=team)
    assert policies.resolve("tiny:closed", headers=team).policy_name == "closed"
    assert policies.resolve("org/qwen:off", prompt_tokens=150).policy_name == "off"
    with pytest.raises(Forbidden, match="allowed: narrow, off"):
        policies.resolve("org/qwen:rag", prompt_tokens=150)


def test_authentication(policies: PolicySet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHT_KEY", "n1")
    entry = policies.authenticate("search-key")
    assert entry is not None
    assert entry.name == "search"
    night = policies.authenticate("n1")
    assert night is not None
    assert night.name == "night"
    for wrong in (None, "", "search-key2", "\ud800"):
        with pytest.raises(Unauthorized) as caught:
            policies.authenticate(wrong)
        assert "search-key2" not in str(caught.value)
    monkeypatch.delenv("NIGHT_KEY")
    with pytest.raises(Unauthorized):
        policies.authenticate("n1")
    assert PolicySet.default().authenticate(None) is None


def test_unset_variables_are_named_with_their_lines(policies: PolicySet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NIGHT_KEY", raising=False)
    monkeypatch.delenv("LISTED_KEY", raising=False)
    with pytest.raises(
        ConfigError, match=r"(?s)<policy>:7: .*NIGHT_KEY is not set.*<policy>:11: .*LISTED_KEY is not set"
    ):
        policies.require_environment()
    with pytest.raises(ConfigError, match=r"LISTED_KEY is not set"):
        policies.upstream_key("listed")
    monkeypatch.setenv("NIGHT_KEY", "n")
    monkeypatch.setenv("LISTED_KEY", "l")
    policies.require_environment()
    assert policies.upstream_key("listed") == "l"
    for none in ("sk-1\n", " sk-1", "sk-€"):
        monkeypatch.setenv("LISTED_KEY", none)
        with pytest.raises(ConfigError, match=r"LISTED_KEY holds no API key") as raised:
            policies.upstream_key("listed")
        assert none.strip() not in str(raised.value)
    assert policies.upstream_key("local") is None
