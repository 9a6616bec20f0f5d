"""New versions of the policy file, taken into force while the server runs: whole, or not at all.

Requests that have begun end under the version that they began with. A file that is refused leaves the old version in
force; the log, a metric and /readyz say so.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from fastapi import FastAPI

from ..policies import PolicySet, ServerSpec
from ..policies.schema import LimitsSpec
from ..prompt import ConfigError, PromptsluiceError
from .backends.base import Backend
from .edge import log, log_failure
from .house import Sluice

Signature = tuple[int, int, int] | None


class Looks:
    """What one look after the other sees of a file. A new version counts once two of them have seen it alike: half of a
    file that is still being written may be a valid one that lacks, say, the API keys.
    """

    def __init__(self, seen: Signature) -> None:
        self._in_force = self._last = seen

    def new(self, found: Signature) -> bool:
        """Whether this look is the first that shows a new version to be whole."""
        settled, self._last = found == self._last, found
        if not settled or found == self._in_force:
            return False
        self._in_force = found
        return True


class Reloader:
    """Watches one policy file for one application, looking every `every_s` seconds. `given` are backends that stand
    for the file's.
    """

    def __init__(self, app: FastAPI, path: Path, *, given: Mapping[str, Backend], every_s: float) -> None:
        self._app = app
        self._path = path
        self._given = given
        self._every_s = every_s
        self._looks = Looks(_signature(path))
        self._retiring: set[asyncio.Task[None]] = set()

    async def watch(self) -> None:
        """Look at the file again and again, for ever."""
        while True:
            await asyncio.sleep(self._every_s)
            if self._looks.new(await asyncio.to_thread(_signature, self._path)):
                await self.reload()

    async def reload(self) -> None:
        """Put the file as it is now into force, or say why not."""
        state = self._app.state
        try:
            policy_set = await asyncio.to_thread(_load, self._path, state.sluice.policy_set)
            fresh = await state.sluice.rewired(policy_set, given=self._given)
        except PromptsluiceError as error:
            self._refused(error.message)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a file, the server goes on
            log_failure(error, request_id="reload")
            self._refused("it could not be put into force; the log says more")
        else:
            self._accepted(fresh)

    async def close(self) -> None:
        """Wait for houses that are still being closed."""
        await asyncio.gather(*self._retiring, return_exceptions=True)

    def _accepted(self, fresh: Sluice) -> None:
        state = self._app.state
        old, state.sluice, state.policy_file_refused = state.sluice, fresh, None
        fresh.draining = old.draining
        fresh.metrics.reloaded(models=fresh.policy_set.model_names())
        log.info("the new version of %s is in force", self._path)
        task = asyncio.create_task(old.retire())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    def _refused(self, why: str) -> None:
        self._app.state.policy_file_refused = why
        self._app.state.sluice.metrics.reloaded(models=None)
        log.error("the new version of %s is refused, the old one stays in force: %s", self._path, why)


@contextlib.asynccontextmanager
async def watching(app: FastAPI, *, given: Mapping[str, Backend], every_s: float) -> AsyncIterator[None]:
    """Watch the application's policy file, if it has one. See Reloader."""
    file = app.state.sluice.policy_set.file
    app.state.policy_file_refused = None
    if file is None:
        yield
        return
    reloader = Reloader(app, Path(file), given=given, every_s=every_s)
    watch = asyncio.create_task(reloader.watch())
    try:
        yield
    finally:
        watch.cancel()
        await asyncio.wait({watch})
        await reloader.close()


def _load(path: Path, old: PolicySet) -> PolicySet:
    """Read a new version. ConfigError for an invalid one, and for settings that only a restart can change."""
    new = PolicySet.load(path)
    new.require_environment()
    fixed = [name for name in ("kv_cache", "collections", "models") if getattr(new, name) != getattr(old, name)]
    if _fixed(new.server) != _fixed(old.server):
        fixed.append("server (all but api_keys, limits and records.text)")
    if fixed:
        raise ConfigError(f"only a restart can change {', '.join(fixed)}", file=str(path))
    return new


def _fixed(server: ServerSpec) -> ServerSpec:
    """The server's settings but for those that may change while it runs."""
    records = server.records.model_copy(update={"text": False})
    return server.model_copy(update={"api_keys": (), "limits": LimitsSpec(), "records": records})


def _signature(path: Path) -> Signature:
    """Changes whenever the file does; None while there is none, as between two steps of an editor."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
