"""`python -m promptsluice` and the `promptsluice` command: hands over to the command line in gateway/cli."""


def main() -> None:
    """Run the command line. Imported late: `import promptsluice.__main__` must stay cheap."""
    from .gateway.cli import app

    app()


if __name__ == "__main__":
    main()
