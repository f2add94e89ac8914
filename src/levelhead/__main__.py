"""`python -m levelhead`: the command line."""

from levelhead.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
