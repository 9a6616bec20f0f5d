"""The base of all parts of a policy file."""

from pydantic import BaseModel, ConfigDict


class Spec(BaseModel):
    """Base of all parts of the file: frozen, strict, unknown keys forbidden."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
