"""Every error that Slipstream raises on purpose.

    SlipstreamError
    |- RecipeError            a recipe, or a setting in it, that cannot be used
    |- DataError              a data file that is missing, damaged or does not fit
    |- TraceError             a recorded step that is damaged, incomplete or of another model
    |- CostError              a cluster's costs that are damaged, or that nobody has measured
    |- PlanError              a plan that does not fit the model or the cluster
    |- UnsupportedModel       a model that data parallelism over replicas cannot carry
    |- RanksDiffer            ranks disagree about the model, the plan or the settings
    |- RankFailure            a rank died, froze, or did not come within the time limit
    |- NonFiniteGradients     a gradient became infinite or NaN and the policy is to stop
    |- TrainingStopped        training was asked to stop, has saved and can be resumed
    |- CheckpointError        a checkpoint that cannot be written, found, trusted or applied
    |- RunFolderError         a run folder that cannot be used
    |- LaunchError            ranks could not be started
    `- LabError               the emulated cluster could not be built, checked or used

Each message is one sentence or two that name the file, rank or setting and the way out, so that
the command line can print it alone.
"""


class SlipstreamError(Exception):
    """Base of all errors raised on purpose; its text is written for the user."""


class RecipeError(SlipstreamError):
    """A recipe, or a setting in it, cannot be used."""


class DataError(SlipstreamError):
    """A data file is missing, damaged, or does not fit what was asked of it."""


class TraceError(SlipstreamError):
    """A trace is missing, damaged, incomplete, or of another model."""


class CostError(SlipstreamError):
    """A cluster's costs are missing, damaged, or do not cover what was asked of them."""


class PlanError(SlipstreamError):
    """A plan does not fit the model or the cluster."""


class UnsupportedModel(SlipstreamError):
    """The model holds parameters that replicated data parallelism cannot carry."""


class RanksDiffer(SlipstreamError):
    """Ranks disagree about the model, the plan or the settings."""


class RankFailure(SlipstreamError):
    """A rank died, froze, or did not come to the job or a collective within the time limit."""


class NonFiniteGradients(SlipstreamError):
    """Gradients became infinite or NaN, and the policy is to stop."""


class TrainingStopped(SlipstreamError):
    """Training was asked to stop; it has saved its state and can be resumed."""


class CheckpointError(SlipstreamError):
    """A checkpoint cannot be written, found, trusted or applied."""


class RunFolderError(SlipstreamError):
    """A run folder cannot be used."""


class LaunchError(SlipstreamError):
    """Ranks could not be started."""


class LabError(SlipstreamError):
    """The emulated cluster could not be built, checked or used."""
