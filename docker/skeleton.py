"""Lays empty packages where pyproject.toml names some: dependencies can be installed before the source is there.

Only the container build runs this: the layer with the dependencies then hangs on three small files, not on the code.
"""

import tomllib
from pathlib import Path

PYPROJECT = Path("pyproject.toml")


def main() -> None:
    """Create each package folder with an empty __init__.py below the present folder; existing files are left alone."""
    for package in tomllib.loads(PYPROJECT.read_text())["tool"]["setuptools"]["packages"]:
        folder = Path(*package.split(".")[1:])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()


if __name__ == "__main__":
    main()
