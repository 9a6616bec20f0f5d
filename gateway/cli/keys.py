"""`promptsluice keys`: make API keys, list them, and take them back. Works on the policy file; a running gateway
follows it. Loads no torch.
"""

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import err

app = typer.Typer(help="API keys of the policy file: make, list, take back.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name of the key: who uses it.")]
File = Annotated[Path, typer.Option("--config", "-c", help="Policy file (YAML).", show_default=False)]
Some = list[str] | None


@app.command()
def create(
    name: Name,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Policy file to write the entry into; without: print it.")
    ] = None,
    scope: Annotated[
        Some, typer.Option(help="A route's scope; several times for more. Default: all but metrics and admin.")
    ] = None,
    model: Annotated[Some, typer.Option(help="Name or glob of a model that it may use. Default: all.")] = None,
    policy: Annotated[Some, typer.Option(help="Policy that it may use. Default: all.")] = None,
    collection: Annotated[Some, typer.Option(help="Name or glob of a collection. Default: all.")] = None,
    expires: Annotated[str | None, typer.Option(help="Its last day (2027-01-31), or a moment with its zone.")] = None,
    limit: Annotated[Some, typer.Option(help="requests_per_minute=60, tokens_per_day=1000000 and the like.")] = None,
) -> None:
    """Make a key. It is printed once, on standard output; the policy file gets its SHA-256 digest only."""
    from ...policies.key_edits import new_key, stanza, with_key

    made = new_key(
        name,
        scopes=scope,
        models=model,
        policies=policy,
        collections=collection,
        expires=expires,
        limits=dict(_limit(text) for text in limit or ()),
    )
    if config is None:
        # Which policies there are only the file knows.
        with_key("version: 1\n", {**made.entry, "policies": ["off"]}, file="<the new key>")
        err().print("put this below api_keys in the section server of the policy file:")
        err().print(stanza(made.entry), markup=False)
    else:
        _rewritten(config, lambda text: with_key(text, made.entry, file=str(config)))
        err().print(f"{name} is in {config}; a running gateway follows within seconds", markup=False)
    err().print("the key, which is shown only now:")
    typer.echo(made.secret)


@app.command("list")
def list_keys(config: File) -> None:
    """List the keys with what they open."""
    from ...policies import PolicySet

    policies = PolicySet.load(config)
    for key in policies.server.api_keys:
        limits = key.limits_over(policies.server.limits).model_dump(exclude_none=True)
        typer.echo(key.name + (" (expired)" if key.expired() else ""))
        for what, some in (
            ("scopes", key.scopes),
            ("models", key.models),
            ("policies", key.policies),
            ("collections", key.collections),
            ("limits", [f"{limit}={most}" for limit, most in limits.items()]),
            ("expires", [_last_moment(key.expires)]),
        ):
            typer.echo(f"    {what:12}{'all' if some is None else ', '.join(some) or 'none'}")
    if not policies.server.api_keys:
        err().print("the policy file lists no keys: everybody is let in")


@app.command()
def revoke(name: Name, config: File) -> None:
    """Take a key out of the policy file. Requests that have begun end; the next one is refused."""
    from ...policies.key_edits import without_key

    _rewritten(config, lambda text: without_key(text, name, file=str(config)))
    err().print(f"{name} is no key any more; a running gateway follows within seconds", markup=False)


def _last_moment(expires: datetime | None) -> str:
    """As it may be written in the file: the end of a day as that day."""
    if expires is None:
        return "never"
    if expires.time() == time(0):
        return f"{expires - timedelta(days=1):%Y-%m-%d}"
    return f"{expires:%Y-%m-%dT%H:%M:%SZ}"


def _limit(text: str) -> tuple[str, Any]:
    name, equals, most = text.partition("=")
    if not equals or not most.strip().isdecimal():
        raise typer.BadParameter(f"a limit looks like requests_per_minute=60, not {text!r}")
    return name.strip(), int(most)


def _rewritten(config: Path, change: Callable[[str], str]) -> None:
    """Put the changed text in the file's place, as a whole or not at all, and one command after the other."""
    from ...policies.load import read_policy_text

    target = config.resolve()
    with _locked(target):
        _replaced(config, target, change(read_policy_text(target)))


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Alone with the file. Whoever had it before may have put another one in its place: then that one is waited for.
    One that cannot be opened is locked by nobody; reading it says why. ConfigError where files cannot be locked.
    """
    from ...prompt import ConfigError

    with ExitStack() as opened:
        while True:
            try:
                file = opened.enter_context(target.open("rb"))
                fcntl.flock(file, fcntl.LOCK_EX)
            except (FileNotFoundError, PermissionError, IsADirectoryError):
                break
            except OSError as error:
                raise ConfigError(f"the policy file cannot be locked: {error.strerror}", file=str(target)) from error
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), target.stat()):
                    break
        yield


def _replaced(config: Path, target: Path, text: str) -> None:
    from ...prompt import ConfigError

    try:
        before = target.stat()
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                os.chown(temporary, before.st_uid, before.st_gid)  # else the gateway could not read it any more
            Path(temporary).chmod(before.st_mode & 0o777)
            Path(temporary).replace(target)
            _sync_folder(target.parent)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(f"the policy file cannot be written: {reason}", file=str(config)) from error


def _sync_folder(folder: Path) -> None:
    """So that the file's new place outlives a power cut, as far as the folder may be read."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
