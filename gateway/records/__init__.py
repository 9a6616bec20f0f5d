"""What happened lately, for the page at /ui: single requests with what became of their prompts, and sums over time."""

from .outline import Fate, Outline, Part, SegmentOutline, outlined
from .record import Record
from .series import Sums
from .store import Records

__all__ = ["Fate", "Outline", "Part", "Record", "Records", "SegmentOutline", "Sums", "outlined"]
