"""Sizes in policy files: whole bytes, or a text such as "2GiB" or "512 MB"."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|kB|KB|MB|GB|TB|KiB|MiB|GiB|TiB)?")
_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_bytes(value: Any) -> Any:
    """Turn "2GiB" into 2147483648; anything that is no text is left for the field's own check. ValueError otherwise."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError('must be a size in bytes, such as 1048576, "512MiB" or "2GiB"')
    return int(float(match[1]) * _UNITS[match[2] or "B"])


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
"""An integer number of bytes, written as a number or with a unit."""
