"""What the user can mend: the base of every error that ends a command with a message instead of a traceback."""


class UserError(Exception):
    """Something that was given cannot work; the message says what, why, and what to do.

    A command prints it and ends with status 2. Everything else is a fault of the program: a traceback and status 1.
    """


class UsageError(UserError):
    """A command line that asks for what cannot be done."""
