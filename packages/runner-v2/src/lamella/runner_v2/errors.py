"""Errors a user of the runner can meet.

RunnerError                 base
├── CheckpointError         a file, tensor or field of the checkpoint is wrong; the message names it
├── UnsupportedError        a known thing that this build or device cannot do; the message says what can
├── ConfigError             an option has a value that cannot work
└── CapacityError           something does not fit; the message gives both figures
"""


class RunnerError(Exception):
    """Base of every error the runner raises on purpose."""


class CheckpointError(RunnerError):
    """A file, tensor or field of the checkpoint is wrong."""


class UnsupportedError(RunnerError):
    """A known thing that this build, device or version cannot do."""


class ConfigError(RunnerError):
    """An option has a value that cannot work."""


class CapacityError(RunnerError):
    """Something does not fit: the message gives what was asked and what there is."""
