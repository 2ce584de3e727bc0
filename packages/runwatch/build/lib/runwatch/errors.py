"""The error that a user can act on: one line with the file or option, its value, what is allowed and what to do."""


class UserError(ValueError):
    """A mistake in settings, files or usage. The command line prints it and exits with code 2."""
