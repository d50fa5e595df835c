"""The one error that the server raises on purpose."""


class StartupError(Exception):
    """The server cannot start. The message is one line: what is wrong, and what to do."""
