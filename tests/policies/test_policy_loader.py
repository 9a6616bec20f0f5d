"""Policy files: what is accepted, and that each mistake is named with its file, its line and the nearest valid key."""

from pathlib import Path

import pytest
from promptsluice.policies import PolicyFileError, PolicySet
from promptsluice.policies.schema import EmbeddedBackend, PrefixCacheSpec, PrefixDiskSpec
from promptsluice.prompt import ConfigError, Kind


def problems(text: str) -> dict[int, str]:
    """Line to message; several messages of one line are joined."""
    with pytest.raises(PolicyFileError) as caught:
        PolicySet.from_text(text, file="p.yaml")
    found: dict[int, str] = {}
    for problem in caught.value.problems:
        found[problem.line] = f"{found.get(problem.line, '')}{problem.message}\n"
        assert f"p.yaml:{problem.line}: {problem.message}" in str(caught.value)
    return found


def test_default_is_one_embedded_backend() -> None:
    policies = PolicySet.default()
    backend = policies.backends["local"]
    assert isinstance(backend, EmbeddedBackend)
    assert backend.model == "smollm2-135m-instruct"
    assert policies.default_policy == "lossless"
    assert list(policies.policies) == ["off", "lossless", "balanced", "aggressive", "rag"]
    assert policies.server.max_body_bytes == 16 * 2**20
    assert policies.server.max_depth == 128


def test_load_without_a_path_is_the_default() -> None:
    assert PolicySet.load(None) == PolicySet.default()


def test_sizes_take_units() -> None:
    text = "version: 1\nkv_cache: {ram: 1.5KiB, disk: 2 GB}\nserver: {max_body_bytes: 12}"
    policies = PolicySet.from_text(text)
    assert (policies.kv_cache.ram, policies.kv_cache.disk, policies.server.max_body_bytes) == (1536, 2 * 10**9, 12)


def test_off_is_a_name_and_not_false() -> None:
    policies = PolicySet.from_text("version: 1\ndefault_policy: off\npolicies:\n  p: {reuse: {mode: off}}\n")
    assert policies.default_policy == "off"
    assert policies.policies["p"].reuse.mode == "off"


def test_children_override_fields_merge_mappings_and_replace_lists() -> None:
    policies = PolicySet.from_text(
        """
version: 1
policies:
  base: {extends: rag, retrieve: {top_k: 9}, protect: {roles: [tool]}}
  child: {extends: base, retrieve: {collection: other}, compress: []}
  cleared: {extends: child, retrieve: null}
  balanced: {extends: balanced, min_prompt_tokens: 7}
"""
    )
    child = policies.policies["child"]
    assert child.retrieve is not None
    assert (child.retrieve.collection, child.retrieve.top_k, child.retrieve.max_tokens) == ("other", 9, 2048)
    assert child.compress == ()
    assert child.reuse.mode == "blend"
    assert child.protect.roles == ("tool",)
    assert policies.policies["cleared"].retrieve is None
    assert policies.policies["balanced"].min_prompt_tokens == 7
    assert len(policies.policies["balanced"].compress) == 2


def test_anchors_and_merge_keys_work() -> None:
    policies = PolicySet.from_text(
        """
version: 1
policies:
  a: &a {min_prompt_tokens: 5, compress: &steps [{use: lossless, kinds: [document]}]}
  b: {<<: *a, min_prompt_tokens: 6}
  c: {compress: *steps}
"""
    )
    assert policies.policies["b"].min_prompt_tokens == 6
    assert policies.policies["b"].compress == policies.policies["c"].compress
    assert policies.policies["c"].compress[0].kinds == (Kind.DOCUMENT,)


@pytest.mark.parametrize(
    ("text", "line", "parts"),
    [
        ("version: 1\ndefault_polcy: off", 2, ["'default_polcy'", "'default_policy'"]),
        ("version: 1\nserver:\n  prt: 1", 3, ["'prt'", "in server", "'port'"]),
        ("version: 1\nbackends:\n  b:\n    kind: embedded\n    kvmemory: 1", 5, ["backends.b", "'kv_memory'"]),
        (
            "version: 1\nbackends:\n  b:\n    kind: openai\n    base_url: http://h\n    timeouts:\n      red: 1",
            7,
            ["'read'"],
        ),
        ("version: 1\npolicies:\n  p:\n    compress:\n    - use: lossless\n      target: 1", 6, ["'target_rate'"]),
        ("version: 1\nroutes:\n- policy: off\n  match:\n    headers: {}", 5, ["routes[0].match", "'header'"]),
    ],
)
def test_unknown_keys_name_the_nearest(text: str, line: int, parts: list[str]) -> None:
    message = problems(text)[line]
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("default_policy: off", 1, "version is required"),
        ("version: 2", 1, "version must be 1"),
        ("version: true", 1, "version must be 1"),
        ("", 1, "empty"),
        ("# nothing\n", 1, "empty"),
        ("- 1", 1, "mapping"),
        ("just text", 1, "mapping"),
        ("version: 1\nx: [", 2, "not valid YAML"),
        ("version: 1\n\tx: 1", 2, "not valid YAML"),
        ("version: 1\nx: \x00", 2, "U+0000"),
        ("version: 1\n---\nversion: 1", 2, "not valid YAML"),
        ("version: 1\nversion: 1", 2, "duplicate key 'version', first given in line 1"),
        ("version: 1\nmodels: !!python/object:os.system {}", 2, "tags"),
        ("version: 1\n? [a]\n: 1", 2, "a key must be a text"),
        ("version: 1\nmodels: &m\n  embedder: *m", 2, "inside the value"),
        ('version: 1\nmodels: {embedder: "\\U00110000"}', 1, "not valid YAML"),
        ("version: 1\nserver: {port: 70000}", 2, "server.port"),
        ("version: 1\nserver: {port: '80'}", 2, "whole number"),
        ("version: 1\nserver: {request_timeout: .nan}", 2, "finite"),
        ("version: 1\nserver: {max_body_bytes: 16MoB}", 2, "size in bytes"),
        ("version: 1\nbackends: {}", 2, "backends"),
        ("version: 1\nbackends: {b: {kind: embedded, prefix_cache: {host: 0, disk: {}}}}", 2, "disk needs some host"),
        ("version: 1\nbackends: {b: {}}", 2, "needs kind: embedded or kind: openai"),
        ("version: 1\nbackends: {b: {kind: vllm}}", 2, "kind must be embedded or openai"),
        ("version: 1\nbackends: {b: {kind: openai}}", 2, "backends.b: needs exactly one of base_url and servers"),
        ("version: 1\nbackends: {b: {kind: openai, base_url: 'ftp://x'}}", 2, "http(s) URL"),
        ("version: 1\nbackends: {b: {kind: openai, base_url: 'http://a..b/v1'}}", 2, "1 to 63 characters"),
        ("version: 1\nbackends: {b: {kind: openai, base_url: 'http://h:x/v1'}}", 2, "host that can be asked for"),
        ("version: 1\ndefault_policy: balancd", 2, "nearest is 'balanced'"),
        ("version: 1\npolicies:\n  p: {extends: rga}", 3, "'rag'"),
        ("version: 1\npolicies:\n  p: {extends: q}\n  q: {extends: p}", 4, "q -> p -> q"),
        ("version: 1\npolicies:\n  p: {extends: p}", 3, "p -> p"),
        ("version: 1\npolicies:\n  'a b': {}", 3, "policy name"),
        ("version: 1\npolicies:\n  p: {allow_client_policy: [of]}", 3, "'off'"),
        ("version: 1\npolicies:\n  p: {allow_client_policy: some}", 3, "all, none or a list"),
        ("version: 1\npolicies:\n  p: {compress: [{use: losless}]}", 3, "'lossless'"),
        ("version: 1\npolicies:\n  p: {compress: [{use: lossless, options: {a: {}}}]}", 3, "flat list"),
        ("version: 1\npolicies:\n  p: {compress: [{use: lossless, options: {colour: 1}}]}", 3, "colour"),
        ("version: 1\npolicies:\n  p: {compress: [{use: lossless, kinds: [documents]}]}", 3, "kinds[0]"),
        ("version: 1\nroutes:\n- {}", 3, "a policy, a backend, a rollout"),
        ("version: 1\nroutes:\n- {backend: locl}", 3, "'local'"),
        ("version: 1\nroutes:\n- {policy: off, match: {api_key: x}}", 3, "defines no API key"),
        ("version: 1\nroutes:\n- {policy: off, match: {prompt_tokens: {min: 2, max: 1}}}", 3, "min must not"),
        ("version: 1\nserver:\n  api_keys:\n  - {name: a}", 4, "exactly one of sha256 and env"),
        ("version: 1\nserver:\n  api_keys:\n  - {name: a, env: X}\n  - {name: a, env: Y}", 5, "given twice"),
    ],
)
def test_mistakes_are_named_where_they_are(text: str, line: int, part: str) -> None:
    assert part in problems(text).get(line, "")


def test_all_problems_come_at_once_in_order() -> None:
    found = problems("version: 3\nserver: {prt: 1, port: x}\ndefault_policy: nope\nroutes: [{}]\nfoo: 1\nfoo: 2\n")
    assert sorted(found) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "text",
    [
        "version: 1\nbackends: {b: {kind: openai, base_url: http://h, api_key: sk-hunter2}}",
        "version: 1\nbackends: {b: {kind: openai, base_url: http://h, api_key_env: sk-hunter2}}",
        "version: 1\nbackends: {b: {kind: openai, base_url: 'http://u:hunter2@h'}}",
        "version: 1\nbackends: {b: {kind: openai, base_url: 'http://h/?key=hunter2'}}",
        "version: 1\nserver: {api_keys: [{name: a, key: hunter2}]}",
        "version: 1\nserver: {api_keys: [{name: a, sha256: hunter2}]}",
        "version: 1\nserver: {api_keys: [hunter2]}",
    ],
)
def test_inline_secrets_are_refused_and_not_repeated(text: str) -> None:
    message = problems(text)[2]
    assert "hunter2" not in message


def test_an_inline_key_says_what_to_do() -> None:
    text = "version: 1\nbackends: {b: {kind: openai, base_url: http://h, api_key: sk-1}}"
    assert "secret" in problems(text)[2]
    assert "api_key_env" in problems(text)[2]


def test_aliases_that_explode_are_stopped() -> None:
    rows = ["version: 1", "a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert any("aliases expand" in message for message in problems("\n".join(rows)).values())


def test_deep_and_long_files_are_refused() -> None:
    assert "levels deep" in problems("version: 1\nx: " + "[" * 5000)[2]
    assert "longer than" in problems("version: 1\n" + "# x\n" * 100_000)[1]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_bytes(b"version: 1\nx: \xff\xfe\n")
    with pytest.raises(ConfigError, match=r"bad\.yaml:2: the file is not UTF-8"):
        PolicySet.load(bad)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        PolicySet.load(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        PolicySet.load(tmp_path)


def test_a_byte_order_mark_is_fine(tmp_path: Path) -> None:
    file = tmp_path / "bom.yaml"
    file.write_bytes(b"\xef\xbb\xbfversion: 1\n")
    assert PolicySet.load(file).file == str(file)


def test_relative_paths_start_at_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    file = tmp_path / "p.yaml"
    file.write_text("version: 1\ncollections: {root: ./c}\nmodels: {cache: /m}\n")
    policies = PolicySet.load(file)
    assert policies.collections_root == tmp_path / "c"
    assert policies.models_cache == Path("/m")
    assert policies.kv_cache_path == tmp_path / "xdg" / "promptsluice" / "kv"
    usual = EmbeddedBackend(kind="embedded", prefix_cache=PrefixCacheSpec(disk=PrefixDiskSpec()))
    assert policies.prefix_cache_path(usual) == tmp_path / "xdg" / "promptsluice" / "prefix"
    assert policies.prefix_cache_path(EmbeddedBackend(kind="embedded")) is None


@pytest.mark.slow
def test_a_chain_of_thousands_of_policies_is_refused_at_once() -> None:
    chain = [f"  p{i}: {{extends: p{i + 1}}}\n" for i in range(3000)]
    with pytest.raises(PolicyFileError) as caught:
        PolicySet.from_text(f"version: 1\npolicies:\n{''.join(chain)}  p3000: {{extends: off}}\n")
    assert {problem.message for problem in caught.value.problems} == {
        "policies extend each other more than 32 times over"
    }
    assert PolicySet.from_text(f"version: 1\npolicies:\n{''.join(chain[-31:])}  p3000: {{extends: off}}\n").policies


def test_values_of_compressor_options_are_not_repeated() -> None:
    options = "version: 1\npolicies: {p: {compress: [{use: extractive, options: {redundancy: sk-secret}}]}}"
    assert "sk-secret" not in problems(options)[2]


def test_the_shared_store_names_its_server_and_where_its_password_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_PASSWORD", raising=False)
    text = "version: 1\nkv_cache: {shared: {url: rediss://cache:6379/2, password_env: REDIS_PASSWORD}}"
    policies = PolicySet.from_text(text)
    assert [problem.message for problem in policies.unset_environment()] == [
        "environment variable REDIS_PASSWORD is not set"
    ]
    with pytest.raises(ConfigError, match="REDIS_PASSWORD"):
        policies.shared_cache_password()
    monkeypatch.setenv("REDIS_PASSWORD", "hidden")
    assert policies.shared_cache_password() == "hidden" and not policies.unset_environment()
    assert PolicySet.from_text("version: 1").shared_cache_password() is None
    for url in ("redis://user:hidden@cache:6379", "http://cache", "redis://"):
        with pytest.raises(ConfigError, match="without user or password") as failed:
            PolicySet.from_text(f"version: 1\nkv_cache: {{shared: {{url: '{url}'}}}}")
        assert "hidden" not in str(failed.value)
