"""The error tree. Each error knows the exit code of the command line; `cli.py` translates in one place."""


class BatchspecError(Exception):
    """A job failed for a reason that a retry may mend (storage, device, worker)."""

    exit_code = 1


class WorkerError(BatchspecError):
    """A worker process died or raised; the message names worker, signal or exit code, and shard."""


class UsageError(BatchspecError):
    """The request cannot be served as written: options, input, or settings. A retry will not help."""

    exit_code = 2


class InputError(UsageError):
    """Input files, columns or types are not what the job needs."""


class MismatchError(UsageError):
    """The output, profile or draft belongs to something else than what was asked for."""


class UnsupportedModelError(UsageError):
    """The model uses something that the engine does not reproduce exactly; the message names it."""


class MissingDependencyError(UsageError):
    """An optional package is missing; the message carries the pip line that mends it."""


class TooManyErrorRows(BatchspecError):
    """The job finished, with more error rows than `--max-error-rate` allows."""

    exit_code = 3


class OutputLocked(BatchspecError):
    """Another run holds the output."""

    exit_code = 4


class AuditFault(BatchspecError):
    """`verify` found a token that the target model would not have written."""

    exit_code = 5


class CostLimitExceeded(BatchspecError):
    """`plan` expects more than `--max-cost-usd`."""

    exit_code = 6


class Interrupted(BatchspecError):
    """A signal ended the run; what is finished is kept, and the same command goes on."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class RowError(Exception):
    """One row cannot be answered; the job goes on and the row becomes an error row.

    `error_type` is a short stable code (`empty_prompt`, `context_overflow`, ...); the message gives the numbers
    and never the prompt's text.
    """

    def __init__(self, error_type: str, message: str) -> None:
        super().__init__(message)
        self.error_type = error_type
        self.message = message
