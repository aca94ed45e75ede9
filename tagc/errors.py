"""Errors that a user can mend: shown as one message, without a traceback."""


class UserError(ValueError):
    """Bad input. The message names the key or file, the value and the remedy."""
