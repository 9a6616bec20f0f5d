"""Summaries of history and long documents, written by a model, checked against what they summarize."""
