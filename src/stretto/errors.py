"""The exceptions that Stretto raises; each message says what, where, why and what to do."""

STOPPED_EXIT_CODE = 75
"""Exit status of a run that saved and stopped on request; a restart resumes it (EX_TEMPFAIL)."""


class StrettoError(Exception):
    """A failure with a known cause: printed as one message, without a traceback."""

    exit_code = 1


class ConfigError(StrettoError):
    """A mistake of the user: an invalid run file, override or argument."""

    exit_code = 2


class ScheduleError(StrettoError):
    """A schedule that loses, duplicates or misplaces data, or that deadlocks."""


class TransportError(StrettoError):
    """A peer did not answer: it died, it hangs, or the network failed."""


class CheckpointError(StrettoError):
    """A checkpoint is missing, damaged, or does not belong to this run."""


class LaunchError(StrettoError):
    """Workers could not be started, or one of them failed."""


class LabError(StrettoError):
    """The lab (an emulated cluster on one machine) cannot be built on this machine."""
