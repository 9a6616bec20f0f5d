"""What the demo reads: pages of a folder and a file of questions."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...prompt import PromptsluiceError

if TYPE_CHECKING:
    from ...rag import Document

_EXAMPLES = Path(__file__).parents[2] / "examples"
DOCS = _EXAMPLES / "data" / "fastapi_docs"
QUESTIONS = _EXAMPLES / "questions.yaml"


def pages_of(folder: Path) -> "list[Document]":
    """Markdown and text files of a folder, in order; of a folder with a part in English, `en`, only that part."""
    from ...rag import documents_in

    pages = documents_in(folder / "en" if (folder / "en").is_dir() else folder)
    if not pages:
        raise PromptsluiceError(f"{folder} has no Markdown or text files")
    return pages


def questions_of(file: Path) -> list[str]:
    """The questions of a YAML file: a list, or the list `questions`, of texts or of mappings with `question`."""
    import yaml

    content: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    entries = content.get("questions") if isinstance(content, dict) else content
    texts = [str(entry.get("question") or "" if isinstance(entry, dict) else entry) for entry in entries or ()]
    if not texts or not all(text.strip() for text in texts):
        raise PromptsluiceError(f"{file} has no list of questions")
    return texts
