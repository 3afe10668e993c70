"""The errors a user can meet.  Each names the offending value and the remedy, on one line."""


class SpotlightError(Exception):
    """Base of every error raised on purpose.

    ``problem`` says what is wrong and names the value; ``remedy`` says what to do about it.
    Picklable, since errors cross process boundaries.
    """

    exit_code = 1

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem}: {self.remedy}"


class BadInputError(SpotlightError):
    """Raised before any expensive work when a recipe, file, option or machine cannot be used."""

    exit_code = 2


class ScorerError(SpotlightError):
    """Raised when a reward scorer fails past its retries: a failure is never a score."""


class FleetError(SpotlightError):
    """Raised when requests cannot be served: attempts used up, results that contradict each other."""


class TrainingError(SpotlightError):
    """Raised when an update or what it led to cannot be trusted: losses or latents that are not finite."""
