"""Reading a policy file: YAML, form, then references; all problems at once, each as `file:line: message`."""

import os
from pathlib import Path as FilePath

from pydantic import ValidationError

from ..prompt import ConfigError
from .complaints import complaints
from .compressor_check import check_compressors
from .references import check_references
from .schema import PolicyFile
from .yamltree import MAX_CHARS, Path, Problem, Tree, read_tree

_SHOWN = 50


class PolicyFileError(ConfigError):
    """A policy file with one or more problems; `problems` has them all, in the order of lines."""

    def __init__(self, file: str, problems: list[Problem]) -> None:
        assert problems, "an error without a problem"
        self.problems = tuple(sorted(set(problems)))
        first, *rest = self.problems
        more = [f"{file}:{problem.line}: {problem.message}" for problem in rest[: _SHOWN - 1]]
        if len(rest) >= _SHOWN:
            more.append(f"... and {len(rest) - _SHOWN + 1} more")
        super().__init__("\n".join([first.message, *more]), file=file, line=first.line)


def read_policy_text(path: str | os.PathLike[str]) -> str:
    """The text of a file; ConfigError when it is missing, unreadable or not UTF-8."""
    try:
        with FilePath(path).open("rb") as file:
            return file.read(MAX_CHARS * 4 + 1).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError("the file is not UTF-8 text", file=str(path), line=line) from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(f"the policy file cannot be read: {reason}", file=str(path)) from error


def parse_policy_text(text: str, *, file: str) -> tuple[PolicyFile, Tree]:
    """The checked content and the tree with its lines. PolicyFileError with all problems otherwise."""
    tree = read_tree(text)
    problems = list(tree.problems)
    if tree.data is not None and not isinstance(tree.data, dict):
        problems.append(Problem(tree.line(()), "a policy file is a mapping that begins with `version: 1`"))
    if not isinstance(tree.data, dict):
        raise PolicyFileError(file, problems or [Problem(1, "the file is empty; it needs at least `version: 1`")])
    parsed: PolicyFile | None = None
    found: list[tuple[Path, str]] = []
    try:
        parsed = PolicyFile.model_validate(tree.data)
    except ValidationError as error:
        found += complaints(error, tree.data)
    found += [*check_references(tree.data), *(check_compressors(parsed) if parsed else ())]
    taken = {problem.line for problem in problems}
    problems += [Problem(tree.line(path), what) for path, what in found if tree.line(path) not in taken]
    if problems or parsed is None:
        raise PolicyFileError(file, problems)
    return parsed, tree
