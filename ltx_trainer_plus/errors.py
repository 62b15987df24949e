"""What the user can mend: the base of every error that ends a command with a message, not with a traceback."""


class UserError(Exception):
    """Something that was given cannot work; the message says what, why, and what to do.

    A command prints it and ends with status 2. Everything else is a fault of the program: a traceback and status 1.
    """


class UsageError(UserError):
    """A command line that asks for what cannot be done."""


class ModelError(UserError, ValueError):
    """A model, or a part of one, that is not there, not whole, not known, or does not fit what is asked of it."""
