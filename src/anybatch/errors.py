"""Everything that anybatch raises or warns with, in one tree.

Every error is also the built-in kind that it is, so code that knows nothing of anybatch can catch it::

    AnybatchError
    ├── BatchError (ValueError)        the named arguments can't be cut: missing, ambiguous, empty
    ├── LossError (TypeError)          the function did not return a loss, or did backward's work itself
    ├── WeightError (ValueError)       `weight=` gives something that is no weight
    ├── TechniqueError (ValueError)    a technique can't work on this model or device, or got wrong options
    │   └── ConflictError              two techniques don't go together
    ├── DoesNotFitError (RuntimeError) not even the smallest micro-batch fits into memory
    └── InexactError (RuntimeError)    the loss of the pieces can't be made the loss of the mini-batch

    InexactWarning (UserWarning)       the same, where the caller asked for a warning, or where exactness
                                       could be neither proved nor refuted
"""

__all__ = [
    "AnybatchError",
    "BatchError",
    "ConflictError",
    "DoesNotFitError",
    "InexactError",
    "InexactWarning",
    "LossError",
    "TechniqueError",
    "WeightError",
]


class AnybatchError(Exception):
    """The base of every error of anybatch."""


class BatchError(AnybatchError, ValueError):
    """The named arguments can't be cut into micro-batches; nothing ran."""


class LossError(AnybatchError, TypeError):
    """The decorated function did not return a loss, or ran backward itself."""


class WeightError(AnybatchError, ValueError):
    """`weight=` gives something that can't weight a micro-batch."""


class TechniqueError(AnybatchError, ValueError):
    """A technique can't do what was asked, here or anywhere; nothing was changed."""


class ConflictError(TechniqueError):
    """Two techniques don't go together."""


class DoesNotFitError(AnybatchError, RuntimeError):
    """Not even the smallest micro-batch fits into memory; all is as it was before the call.

    Attributes:
        rows: Rows of the smallest micro-batch.
        needed_bytes: What it needs beyond what was in use; None where that is not known.
        available_bytes: What there was; None where that is not known.
    """

    def __init__(
        self,
        message: str,
        rows: int = 1,
        needed_bytes: int | None = None,
        available_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rows = rows
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class InexactError(AnybatchError, RuntimeError):
    """The micro-batches can't give the gradient of the whole mini-batch.

    Attributes:
        causes: What stands in the way, one sentence each, naming the operation.
    """

    def __init__(self, message: str, causes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.causes = causes


class InexactWarning(UserWarning):
    """The result may differ from that of the whole mini-batch, and why."""
