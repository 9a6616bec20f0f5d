"""Structured output: what a grammar may be, its compilation, and the masks that keep a generation within it."""

from .compiler import CompiledGrammar, GrammarCompiler
from .masks import Masks
from .matcher import Matcher
from .spec import Grammar

__all__ = ["CompiledGrammar", "Grammar", "GrammarCompiler", "Masks", "Matcher"]
