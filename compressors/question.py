"""Which question a segment is judged by: that of its own turn, so that a later turn rewrites earlier ones the same way.

If history were judged by the newest question, every turn would change all text before it and no prefix cache would hit.
"""

from collections.abc import Callable

from ..prompt import Kind, Path, Prompt, Segment
from ..prompt.cut import split_fences, split_question

_HEAD, _TAIL = 300, 700


def question_finder(prompt: Prompt, *, question: str) -> Callable[[Segment], str]:
    """A function from segment to question: `question` for the last user message and what follows it, else what the
    latest user message up to the segment's own message asks. Of user messages in a row (documents, then the question)
    the last one asks. "" where no user has spoken yet.
    """
    leaves: dict[int, dict[Path, str]] = {}
    for segment in prompt.segments:
        if segment.role == "user" and segment.original and segment.kind is not Kind.IMAGE:
            texts = leaves.setdefault(segment.message, {})
            texts[segment.path] = texts.get(segment.path, "") + segment.original
    # The last text part asks; the parts before it are documents.
    questions = {message: focus(asked_in(list(texts.values())[-1])) for message, texts in leaves.items()}
    if question:
        questions[max(questions, default=-1)] = focus(question)

    def find(segment: Segment) -> str:
        turn = max((message for message in questions if message <= segment.message), default=None)
        if turn is None:
            return ""
        while turn + 1 in questions:
            turn += 1
        return questions[turn]

    return find


def asked_in(text: str) -> str:
    """What a user message's text asks, without documents and code: as `Prompt.question` says it of the last one, so
    that a message asks the same when it has become history.
    """
    asked = (piece for kind, piece in split_question(text) if kind is Kind.QUESTION)
    return "".join(part for piece in asked for is_code, part in split_fences(piece) if not is_code)


def focus(question: str) -> str:
    """A long message cut to its beginning and its end, where people put the question; embedders read only so much."""
    question = question.strip()
    if len(question) <= _HEAD + _TAIL:
        return question
    return f"{question[:_HEAD]} … {question[-_TAIL:]}"
