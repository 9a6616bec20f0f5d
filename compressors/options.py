"""Options of a compressor: dataclass fields that know how to check themselves, whether set in Python or in a policy
file.

A check takes (name, value) and returns the value in its right type, or raises BadRequest with `param=name`.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import field, fields
from pathlib import Path
from typing import Any, TypeVar

from ..prompt import BadRequest, Kind

T = TypeVar("T")
Check = Callable[[str, Any], Any]


def option(default: T, check: Check) -> T:
    """A dataclass field with a default and a check."""
    return field(default=default, metadata={"check": check})


def check_options(owner: Any) -> None:
    """Check every option of a frozen dataclass and put the parsed values in place."""
    for item in fields(owner):
        check: Check = item.metadata["check"]
        object.__setattr__(owner, item.name, check(item.name, getattr(owner, item.name)))


def rate(name: str, value: Any) -> float:
    """A share of tokens to keep: above 0, at most 1."""
    number = _number(name, value)
    if not 0.0 < number <= 1.0:
        raise BadRequest(f"{name} must be above 0 and at most 1", param=name)
    return number


def share(name: str, value: Any) -> float:
    """A weight from 0 to 1."""
    number = _number(name, value)
    if not 0.0 <= number <= 1.0:
        raise BadRequest(f"{name} must be from 0 to 1", param=name)
    return number


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false", param=name)
    return value


def text(name: str, value: Any) -> str:
    """A text, which may be empty."""
    if not isinstance(value, str):
        raise BadRequest(f"{name} must be a text", param=name)
    return value


def seconds(name: str, value: Any) -> float:
    """A time above 0."""
    number = _number(name, value)
    if not number > 0.0:
        raise BadRequest(f"{name} must be above 0 seconds", param=name)
    return number


def whole(*, least: int) -> Check:
    """An integer of at least `least`."""

    def check(name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise BadRequest(f"{name} must be a whole number of at least {least}", param=name)
        return value

    return check


def or_none(check: Check) -> Check:
    """The same, or nothing at all."""
    return lambda name, value: None if value is None else check(name, value)


def folder(name: str, value: Any) -> str:
    """The path of a folder that exists, or nothing."""
    if not isinstance(value, str):
        raise BadRequest(f"{name} must be the path of a folder", param=name)
    if value and not Path(value).is_dir():
        raise BadRequest(f"{name}: there is no folder {value!r}", param=name)
    return value


def kinds(name: str, value: Any) -> frozenset[Kind]:
    """Segment kinds by name."""
    return frozenset(Kind(item) for item in _names(name, value, {str(kind) for kind in Kind}))


def one_of(*allowed: str) -> Check:
    """One of these names."""

    def check(name: str, value: Any) -> str:
        if value not in allowed:
            raise BadRequest(f"{name} must be one of {', '.join(allowed)}", param=name)
        return value

    return check


def some_of(allowed: Collection[str]) -> Check:
    """Any subset of these names."""
    return lambda name, value: frozenset(_names(name, value, allowed))


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequest(f"{name} must be a number", param=name)
    return float(value)


def _names(name: str, value: Any, allowed: Collection[str]) -> Iterable[str]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise BadRequest(f"{name} must be a list of names", param=name)
    items = [str(item) for item in value]
    for item in items:
        if item not in allowed:
            raise BadRequest(f"{name}: {item!r} is none of {', '.join(sorted(allowed))}", param=name)
    return items
