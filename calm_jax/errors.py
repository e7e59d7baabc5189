"""The two exceptions that mean something to whoever typed the command."""


class UserError(Exception):
    """Bad input, in one line that names the thing, its value and the way out.

    Commands print it without a traceback and exit with status 2.
    """


class Interrupted(BaseException):
    """The run was asked to stop (SIGTERM, Ctrl-C); what it says is what was saved.

    Like KeyboardInterrupt it is no Exception, so that nothing on the way out takes it for a failure.
    """
