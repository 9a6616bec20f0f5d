"""Anthropic's Messages API, answered by chat completions or by an upstream that speaks it itself."""
