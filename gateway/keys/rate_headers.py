"""Levels of limits as response headers, under OpenAI's names, and Anthropic's below /v1/messages."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta

from .limits import Level


def rate_headers(levels: Iterable[Level]) -> dict[str, str]:
    """`x-ratelimit-limit-`, `-remaining-` and `-reset-`, for requests and for tokens.

    Of several limits of a kind it is the one with the least left.
    """
    headers: dict[str, str] = {}
    for what, level in tightest(levels).items():
        headers[f"x-ratelimit-limit-{what}"] = str(level.limit.most)
        headers[f"x-ratelimit-remaining-{what}"] = str(level.remaining)
        headers[f"x-ratelimit-reset-{what}"] = duration(level.reset_s)
    return headers


def anthropic_headers(levels: Iterable[Level], *, now: datetime | None = None) -> dict[str, str]:
    """The same under `anthropic-ratelimit-`; times are moments there."""
    headers: dict[str, str] = {}
    for what, level in tightest(levels).items():
        again = (now or datetime.now(UTC)) + timedelta(seconds=level.reset_s)
        headers[f"anthropic-ratelimit-{what}-limit"] = str(level.limit.most)
        headers[f"anthropic-ratelimit-{what}-remaining"] = str(level.remaining)
        headers[f"anthropic-ratelimit-{what}-reset"] = again.strftime("%Y-%m-%dT%H:%M:%SZ")
    return headers


def tightest(levels: Iterable[Level]) -> Mapping[str, Level]:
    """By `requests` and `tokens` the level with the least left."""
    found: dict[str, Level] = {}
    for level in levels:
        known = found.get(level.limit.what)
        if known is None or level.remaining < known.remaining:
            found[level.limit.what] = level
    return found


def duration(seconds: float) -> str:
    """As OpenAI writes them: 20ms, 1.5s, 6m0s, 23h59m59s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    if seconds < 60:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"
