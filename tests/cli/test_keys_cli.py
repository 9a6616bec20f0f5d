"""`keys`: made once, kept as a digest, listed and taken back; the rest of the file stays as it is."""

import errno
import fcntl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from promptsluice.gateway.cli import app
from promptsluice.gateway.cli.keys import create, revoke
from promptsluice.policies import PolicySet
from promptsluice.policies.key_edits import new_key, with_key, without_key
from promptsluice.policies.match import digest
from promptsluice.prompt import BadRequest, ConfigError
from typer.testing import CliRunner, Result

TWO = f"""# ours
version: 1
server:   # where
  port: 8001
  api_keys:
    # the first
    - name: one  # of two
      sha256: {digest("one")}
      scopes:
        - inference

    - {{name: two, sha256: {digest("two")}}}
  # behind the keys
  drain_timeout: 3

backends:
  far: {{kind: openai, base_url: "http://x/v1"}}
policies:
  house: {{extends: off}}
"""


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["keys", *arguments])
    assert result.exit_code == code, result.output
    return result


def test_a_key_is_made_printed_once_and_kept_as_its_digest(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(TWO)
    file.chmod(0o640)
    options = ["--scope", "inference", "--scope", "embeddings", "--policy", "house", "--model", "gpt-*"]
    options += ["--collection", "docs", "--expires", "2031-05-01", "--limit", "requests_per_minute=60"]
    result = run("create", "three", "-c", str(file), *options)
    secret = result.stdout.strip()
    assert secret.startswith("psk_") and len(secret) > 40 and secret not in result.stderr
    text = file.read_text()
    assert secret not in text and file.stat().st_mode & 0o777 == 0o640 and [*tmp_path.iterdir()] == [file]
    made = PolicySet.load(file).authenticate(secret)
    assert made is not None and made.name == "three" and made.scopes == ("inference", "embeddings")
    assert (made.policies, made.models, made.collections) == (("house",), ("gpt-*",), ("docs",))
    assert made.limits.requests_per_minute == 60 and made.expires is not None and made.expires.month == 5
    start, end = TWO.split("  # behind the keys")
    assert text.startswith(start) and text.endswith("  # behind the keys" + end)
    listed = run("list", "-c", str(file)).stdout
    for shown in ("three", "limits      requests_per_minute=60", "models      gpt-*", "house", "2031-05-01", "never"):
        assert shown in listed
    assert digest(secret)[:8] not in listed
    run("revoke", "three", "-c", str(file))
    assert file.read_text() == TWO


def test_many_commands_at_once_change_the_file_one_after_the_other(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(TWO)
    names = [f"many-{number}" for number in range(12)]
    with ThreadPoolExecutor(len(names) + 1) as threads:
        made = [threads.submit(create, name, config=file) for name in names]
        made.append(threads.submit(revoke, "two", config=file))
    for one in made:
        one.result()
    assert sorted(key.name for key in PolicySet.load(file).server.api_keys) == sorted(["one", *names])
    assert [*tmp_path.iterdir()] == [file]


def test_a_file_that_cannot_be_locked_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unlockable(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    file = tmp_path / "policy.yaml"
    file.write_text(TWO)
    monkeypatch.setattr(fcntl, "flock", unlockable)
    with pytest.raises(ConfigError, match="cannot be locked: No locks available"):
        create("three", config=file)
    assert file.read_text() == TWO


def test_without_a_file_the_entry_is_printed() -> None:
    result = run("create", "any", "--policy", "of-a-file")
    entry = yaml.safe_load(result.stderr[result.stderr.index("- name") : result.stderr.index("the key, which")])
    assert entry == [{"name": "any", "sha256": digest(result.stdout.strip()), "policies": ["of-a-file"]}]


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["--scope", "everything"], 1, "scopes"),
        (["--limit", "requests_per_minute"], 2, "looks like"),
        (["--limit", "tokens=7"], 1, "unknown key 'tokens'"),
        (["--expires", "soon"], 1, "must be a day"),
        (["--policy", "nosuch"], 1, "unknown policy 'nosuch'"),
    ],
)
def test_what_cannot_be_is_said_and_nothing_is_written(
    tmp_path: Path, arguments: list[str], code: int, complaint: str
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(TWO)
    result = run("create", "three", "-c", str(file), *arguments, code=code)
    assert complaint in result.stderr and "psk_" not in result.output
    assert file.read_text() == TWO


def test_the_name_of_another_key_and_a_file_that_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(TWO)
    assert "given twice" in run("create", "two", "-c", str(file), code=1).stderr
    assert "cannot be read" in run("create", "two", "-c", str(tmp_path / "none"), code=1).stderr
    assert "there is no API key 'ten'" in run("revoke", "ten", "-c", str(file), code=1).stderr


@pytest.mark.parametrize(
    "text",
    [
        "version: 1",
        "version: 1\r\nserver:\r\n  port: 1\r\n",
        "version: 1\nserver:\n  api_keys:\n  - name: a\n    env: A # end",
        "version: 1\nserver:\n    api_keys:\n        -   name: a\n            env: A\n            limits:\n"
        "                concurrent: 2\n\n\n# the end\n",
        'version: 1\nserver:\n  api_keys:\n    - name: "ä\u2028ö"\n      env: A\nroutes: []\n',
    ],
)
def test_a_key_comes_and_goes_wherever_keys_may_stand(text: str) -> None:
    made = new_key("new key: #1", scopes=["metrics"])
    changed = with_key(text, made.entry, file="f")
    found = PolicySet.from_text(changed).server.api_keys
    assert found[-1].name == "new key: #1" and made.secret not in changed + repr(made)
    assert [key.name for key in found[:-1]] == [key.name for key in PolicySet.from_text(text).server.api_keys]
    assert set(text.splitlines()) <= set(changed.splitlines())
    another = with_key(changed, new_key("another").entry, file="f")
    left = without_key(another, "new key: #1", file="f")
    assert [key.name for key in PolicySet.from_text(left).server.api_keys] == [
        *[key.name for key in found[:-1]],
        "another",
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("version: 1\nserver: {port: 1}\n", "one line"),
        ("version: 1\nserver:\n  api_keys: [{name: a, env: A}, {name: b, env: B}]\n", "one line"),
        ("{version: 1}", "one line"),
        ("version: 2\n", "version must be 1"),
    ],
)
def test_what_is_written_on_one_line_is_left_to_its_owner(text: str, complaint: str) -> None:
    with pytest.raises((BadRequest, ConfigError), match=complaint):
        with_key(text, new_key("new").entry, file="f")
    if "name: b" in text:
        with pytest.raises(BadRequest, match="by hand"):
            without_key(text, "a", file="f")


def test_the_last_key_stays() -> None:
    text = "version: 1\nserver:\n  api_keys:\n    - name: a\n      env: A\n"
    with pytest.raises(BadRequest, match="everybody is let in"):
        without_key(text, "a", file="f")


def test_a_key_that_others_lean_on_is_left_to_its_owner() -> None:
    text = "version: 1\nserver:\n  api_keys:\n    - &first\n      name: a\n      env: A\n    - {<<: *first, name: b}\n"
    with pytest.raises((BadRequest, ConfigError)):
        without_key(text, "a", file="f")
