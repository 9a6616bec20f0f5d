"""The form of the log: lines for people, or one JSON object a line. For uvicorn's loggers and ours alike."""

import json
import logging
import traceback
from datetime import UTC, datetime
from typing import Any, Literal

log = logging.getLogger("promptsluice.gateway")
Format = Literal["text", "json"]


class JsonLines(logging.Formatter):
    """`time` (UTC), `level`, `logger`, `message`; a request's line has its fields instead of a message.

    Of an exception only the kind is told, for its message may quote a prompt or a key.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        line |= {"message": record.getMessage()} if fields is None else {"event": "request", **fields}
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = f"{record.exc_info[0].__module__}.{record.exc_info[0].__qualname__}"
        return json.dumps(line, default=str)


def log_config(form: Format, level: str) -> dict[str, Any]:
    """For logging.config.dictConfig: everything goes to stderr, once."""
    text = {"()": "uvicorn.logging.DefaultFormatter", "fmt": "%(levelprefix)s %(message)s", "use_colors": None}
    shown = level.upper()
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"chosen": text if form == "text" else {"()": JsonLines}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "chosen", "stream": "ext://sys.stderr"}},
        "loggers": {
            name: {"handlers": ["stderr"], "level": shown, "propagate": False} for name in ("uvicorn", "promptsluice")
        },
        "root": {"handlers": ["stderr"], "level": shown if shown in ("DEBUG", "TRACE") else "WARNING"},
    }


def log_failure(error: BaseException, *, request_id: str) -> None:
    """Log an unexpected exception: its kind and its frames, never its message, which may quote a prompt or a key."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    causes: list[str] = []
    at: BaseException | None = error
    while at is not None and len(causes) < 8:
        causes.append(f"{type(at).__module__}.{type(at).__qualname__}")
        at = at.__cause__ or at.__context__
    log.error("request %s failed: %s\n%s", request_id, " from ".join(causes), frames)
