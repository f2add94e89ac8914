"""Errors that speak to the user: what was given, what was expected, what to do.

Every error the package raises on purpose is a `LevelheadError`; the command line prints its
one sentence and leaves with `exit_code`. Errors about values are `ValueError`s as well, so that
code written against scikit-learn or pandas catches them where it expects to.
"""

from __future__ import annotations

__all__ = [
    "DataError",
    "DivergenceError",
    "InputError",
    "Interrupted",
    "LevelheadError",
    "LevelheadWarning",
    "StoredFileError",
]


class LevelheadError(Exception):
    """Base of every deliberate error; `exit_code` is what the command line leaves with."""

    exit_code: int = 2


class InputError(LevelheadError, ValueError):
    """An argument or option that cannot be used as given."""


class DataError(InputError):
    """A table that cannot be used as it is: names the column, the first bad row and the count."""


class StoredFileError(LevelheadError, ValueError):
    """A file of ours (model, run, download) that is truncated, altered or from a newer version."""


class DivergenceError(LevelheadError, ArithmeticError):
    """Training produced a loss that is not finite; says the step and what to try."""


class Interrupted(LevelheadError, KeyboardInterrupt):
    """Training was stopped by a signal and left a state that can be resumed."""

    exit_code = 130

    def __init__(self, message: str, signal: str | None = None) -> None:
        super().__init__(message)
        self.signal = signal


class LevelheadWarning(UserWarning):
    """Something the user should know that does not stop the work."""
