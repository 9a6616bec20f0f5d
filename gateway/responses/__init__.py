"""OpenAI's Responses API on top of chat completions: read, translated, answered, and kept for the next turn."""
