"""Structured output: what a grammar may be, its compilation, and the masks that keep a generation within it.

Only the compiler and what follows a generation need torch and the grammar library; they are imported by module.
"""

from .spec import Grammar

__all__ = ["Grammar"]
