"""Errors that a user can act on.

Everything a user may get wrong is raised as `UserError` with one line that names the setting or file, its value,
what is allowed and what to do. The command line prints that line and exits with code 2.
"""


class UserError(ValueError):
    """A mistake in settings, files or usage; its message is one clear line."""


class SettingsError(UserError):
    """Several mistakes in settings, in one line."""

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = list(problems)

    def __str__(self) -> str:
        return "; ".join(self.problems)


class TextError(UserError):
    """A text of several that cannot be used."""

    def __init__(self, name: str, index: int, problem: str) -> None:
        super().__init__(name, index, problem)
        self.name, self.index, self.problem = name, index, problem

    def __str__(self) -> str:
        return f"{self.name}[{self.index}]{self.problem}"


class Interrupted(Exception):  # noqa: N818 (not an error: the user asked for it)
    """The user or the machine asked to stop; work was saved where that was possible. The text says how to go on."""

    def __init__(self, message: str, exit_code: int = 130) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def first_line(error: BaseException) -> str:
    """The reason in an error of another library, short enough for one line of ours."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
