"""Texts with a structure of their own, written shorter: tables, logs, diffs, HTML, source code."""
