"""The errors a run can end with, each worded for the person who must act on it."""

from __future__ import annotations


class TrainForgeError(Exception):
    """Something a person has to know; its text says what happened and what to do.

    `exit_code` is what the command line ends with: 1 when the run failed, 2 when the user must change
    something before it can start.
    """

    exit_code = 1


class UserError(TrainForgeError):
    """The user must change something; nothing has been trained yet."""

    exit_code = 2


class SelectionError(UserError):
    """The plugins asked for cannot be found, loaded or told apart."""


class ConfigError(UserError):
    """The recipe or an override holds an unknown key, a wrong type or a value that cannot be honoured."""


class IncompatibleError(UserError):
    """The chosen providers do not fit together, or do not fit the run that is being resumed."""


class DataError(UserError):
    """The training data is missing, empty or unusable."""


class ProviderError(TrainForgeError):
    """A plugin failed while it did its work; names the plugin, its stage and what it was doing."""

    def __init__(self, plugin: str, stage: str, doing: str, cause: BaseException) -> None:
        self.plugin, self.stage, self.doing = plugin, stage, doing
        super().__init__(f"{plugin} ({stage}) failed while {doing}: {type(cause).__name__}: {cause}")
        self.__cause__ = cause


class OutOfMemory(ProviderError):
    """Memory of the device or the host ran out while a plugin worked; says what to lower."""

    def __init__(self, plugin: str, stage: str, doing: str, cause: BaseException, advice: str) -> None:
        super().__init__(plugin, stage, doing, cause)
        said = str(cause).partition(". GPU")[0] or type(cause).__name__
        self.args = (f"{plugin} ({stage}) ran out of memory while {doing} ({said}): {advice}",)


class CheckpointError(TrainForgeError):
    """A checkpoint cannot be written, or what lies on disk is not what was written."""


class RanksError(TrainForgeError):
    """A rank died, came late or disagrees with the others."""


class DataExhausted(Exception):
    """`Data.take` has no further sample for this run; StopIteration would be swallowed by generators."""
