"""Document: what goes into a collection. Decoding and validation of texts from requests and files."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ..prompt import BadRequest

_MARKDOWN_SUFFIX = (".md", ".markdown", ".mdx")
_TEXT_SUFFIX = (".txt", ".text", ".log", ".csv")
_MARKDOWN_SIGN = re.compile(r"^(?: {0,3}#{1,6} \S| {0,3}(?:```|~~~))", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A text with a name of the caller's choice (any string) and JSON metadata that comes back with its hits.

    `markdown` None decides by the id's suffix, and without a telling one by headings or code fences in the text.
    """

    id: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    markdown: bool | None = None

    @classmethod
    def from_bytes(cls, id: str, data: bytes, *, metadata: Mapping[str, Any] | None = None) -> Self:
        """Decode UTF-8, or UTF-16 with a byte order mark. Anything else is a BadRequest that names the document."""
        utf16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")
        try:
            text = data.decode("utf-16" if utf16 else "utf-8-sig")
        except UnicodeDecodeError as error:
            raise _bad(id, f"is not UTF-8 text (byte {error.start})") from error
        if "\0" in text:
            raise _bad(id, "is binary, not text")
        return cls(id=id, text=text, metadata=metadata or {})

    @classmethod
    def from_file(cls, path: Path, *, id: str | None = None) -> Self:
        """Read a file; its path is the id unless one is given. BadRequest when it cannot be read."""
        name = str(path) if id is None else id
        try:
            data = path.read_bytes()
        except OSError as error:
            raise _bad(name, f"cannot be read: {error.strerror}") from error
        return cls.from_bytes(name, data)

    @property
    def is_markdown(self) -> bool:
        """Whether the text is cut by Markdown structure."""
        if self.markdown is not None:
            return self.markdown
        name = self.id.lower()
        return name.endswith(_MARKDOWN_SUFFIX) or (
            not name.endswith(_TEXT_SUFFIX) and _MARKDOWN_SIGN.search(self.text) is not None
        )

    @property
    def digest(self) -> str:
        """Digest of all that decides how the document is stored."""
        content = json.dumps([self.text, self.metadata, self.is_markdown], sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def check(documents: Sequence[Document]) -> None:
    """Raise BadRequest, naming the first document that cannot be stored."""
    seen = set()
    for document in documents:
        if document.id in seen:
            raise _bad(document.id, "is given twice")
        seen.add(document.id)
        if "\0" in document.text:
            raise _bad(document.id, "is binary, not text")
        try:
            # One question for all of it: lone surrogates, keys that are no strings, NaN, and what is no JSON at all.
            values = [document.id, document.text, document.metadata]
            json.dumps(values, ensure_ascii=False, allow_nan=False, sort_keys=True).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise _bad(document.id, f"cannot be stored as JSON text: {error}") from error


def documents_in(folder: Path, *, suffixes: Sequence[str] = (".md", ".markdown", ".txt")) -> list[Document]:
    """All text and Markdown files below a folder, sorted; ids are their paths relative to it, with slashes."""
    if not folder.is_dir():
        raise BadRequest(f"{folder} is no folder", param="folder")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes and path.is_file())
    return [Document.from_file(path, id=path.relative_to(folder).as_posix()) for path in paths]


def _bad(id: str, what: str) -> BadRequest:
    return BadRequest(f"document {id!r} {what}", param="documents", code="unreadable_document")
