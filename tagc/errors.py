"""Errors that a user can fix, shown as one message without a traceback, and the signal that ends a sweep early."""


class UserError(ValueError):
    """Bad input. The message names the key or file, the value and the remedy."""


class SweepStopped(BaseException):
    """Ends the launcher's loop over the points at the first one that failed, if ``sweep.fail_fast`` is set."""
