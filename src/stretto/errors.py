"""Every error Stretto raises on purpose; each tells what, where, why and what to do."""

STOPPED_EXIT_CODE = 75
"""A run that was asked to stop, saved and ended: start it again and it goes on (EX_TEMPFAIL)."""


class StrettoError(Exception):
    """A failure we understand: printed as one message, without a traceback."""

    exit_code = 1


class ConfigError(StrettoError):
    """The caller's mistake: a run file, an override or an argument that cannot be."""

    exit_code = 2


class ScheduleError(StrettoError):
    """A schedule that loses, doubles or misplaces data, or whose ranks wait in a circle."""


class ChannelError(StrettoError):
    """A peer did not answer: it died, hung, or the network between us failed."""


class CheckpointError(StrettoError):
    """A checkpoint is missing, damaged, or does not belong to this run."""


class LaunchError(StrettoError):
    """Workers could not be started, or one of them failed."""


class LabError(StrettoError):
    """The cluster in a box cannot be built here."""
