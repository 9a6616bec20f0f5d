"""Summaries that were made, kept by content for each tenant: in memory, and on disk where the policy file says so."""

import logging
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

from ..compressors.context import Memory
from ..policies.schema import SummariesSpec
from .kept_texts import KeptTexts

log = logging.getLogger("promptsluice.gateway")

_TABLE = "CREATE TABLE IF NOT EXISTS summaries (tenant TEXT, key TEXT, text TEXT, used REAL, PRIMARY KEY (tenant, key))"
_OVER = """
DELETE FROM summaries WHERE rowid IN (
    SELECT rowid FROM (
        SELECT rowid, SUM(LENGTH(CAST(text AS BLOB)) + 256) OVER (ORDER BY used DESC, rowid DESC) AS size
        FROM summaries)
    WHERE size > ?)
"""
_PATIENCE_S = 1.0


class Summaries:
    """All tenants' summaries. `spec` bounds both places. Any thread."""

    def __init__(self, spec: SummariesSpec, path: Path | None) -> None:
        self._texts = KeptTexts(limit=spec.bytes, total=spec.bytes, age=spec.age)
        self._disk = _Disk(path, limit=spec.disk, age=spec.age) if path is not None else None

    def of(self, tenant: str) -> Memory:
        """A tenant's own."""
        return _Own(self, tenant)

    def get(self, tenant: str, key: str) -> str | None:
        found = self._texts.get(tenant, key)
        if found is None and self._disk is not None:
            found = self._disk.get(tenant, key)
            if found is not None:
                self._texts.put(tenant, key, found)
        return found

    def put(self, tenant: str, key: str, text: str) -> None:
        self._texts.put(tenant, key, text)
        if self._disk is not None:
            self._disk.put(tenant, key, text)


class _Own:
    def __init__(self, summaries: Summaries, tenant: str) -> None:
        self._summaries, self._tenant = summaries, tenant

    def get(self, key: str) -> str | None:
        return self._summaries.get(self._tenant, key)

    def put(self, key: str, text: str) -> None:
        self._summaries.put(self._tenant, key, text)


class _Disk:
    """One SQLite file, which several gateways may share. A disk that fails costs a summary, never a request."""

    def __init__(self, path: Path, *, limit: int, age: float) -> None:
        self._path, self._limit, self._age = path, limit, age
        self._lock = threading.Lock()

    def get(self, tenant: str, key: str) -> str | None:
        try:
            with self._lock, closing(self._open()) as db, db:
                row = db.execute(
                    "SELECT text FROM summaries WHERE tenant = ? AND key = ? AND used > ?",
                    (tenant, key, time.time() - self._age),
                ).fetchone()
                if row is not None:
                    db.execute("UPDATE summaries SET used = ? WHERE tenant = ? AND key = ?", (time.time(), tenant, key))
        except (sqlite3.Error, OSError) as error:
            log.warning("kept summaries cannot be read: %s", type(error).__name__)
            return None
        return None if row is None else str(row[0])

    def put(self, tenant: str, key: str, text: str) -> None:
        try:
            with self._lock, closing(self._open()) as db, db:
                db.execute("REPLACE INTO summaries VALUES (?, ?, ?, ?)", (tenant, key, text, time.time()))
                db.execute("DELETE FROM summaries WHERE used <= ?", (time.time() - self._age,))
                db.execute(_OVER, (self._limit,))
        except (sqlite3.Error, OSError, UnicodeError) as error:
            log.warning("a summary cannot be kept on disk: %s", type(error).__name__)

    def _open(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(self._path, timeout=_PATIENCE_S)
        db.execute(_TABLE)
        return db
