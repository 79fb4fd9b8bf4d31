"""The two kinds of failure a user sees, each with its exit code."""


class UsageError(ValueError):
    """A mistake in the options or the input files. The command ends with exit code 2 and this one message."""


class RunError(RuntimeError):
    """Something that happened during a run. The command ends with exit code 1; what was computed stays on disk."""
