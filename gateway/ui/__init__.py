"""The built-in page at /ui, and the JSON that it reads."""
