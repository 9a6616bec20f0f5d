"""Marks that only the house and the model's template may make, taken out of retrieved text: its `<` is written `&lt;`,
its `[` `&#91;`.

Those are the tags of our own block, and the texts of control tokens: a server that knows no better would read these as
the beginning of a turn or of a tool call. Which model will read a text is not known when it is stored: so all of them.
"""

import re

# Blanks, control characters, and what Unicode calls default ignorable: no reader sees them.
_UNSEEN = (
    r"[\s\x00-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    r"\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]*+"
)
_NAMES = "|".join(_UNSEEN.join(name) for name in ("context", "document"))
_OWN_TAG = rf"<(?={_UNSEEN}(?:[/\\]{_UNSEEN})*+(?:{_NAMES}))"
# ChatML and Llama 3 (<|im_start|>), DeepSeek (<｜User｜>), Llama 2 (<<SYS>>, [INST]), Gemma, Mistral, Hermes.
_BARS = r"<(?=[|｜][^\s<>|｜]{1,80}[|｜]>)"
_TAGS = r"<(?=/?(?:s|bos|eos|think|tool_call|tool_response|(?:start|end)_of_\w{1,20})>|<?/?SYS>>)"
_BRACKETS = r"\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT)\])"
_MARK = re.compile(rf"(?i:{_OWN_TAG})|{_BARS}|{_TAGS}|{_BRACKETS}")


def escaped(text: str) -> str:
    """The text without such marks; one that has none, or was escaped before, stays as it is."""
    return _MARK.sub(lambda found: "&lt;" if found[0] == "<" else "&#91;", text)
