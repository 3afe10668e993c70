"""What denoising produces under the simulated executor: nothing, or, in the local executor, real latents."""

from typing import Protocol

from spotlight_core.events import Start


class Work(Protocol):
    """What denoising produces.  Called once per stretch of denoise steps."""

    def finish(self, start: Start) -> tuple[str, str]:
        """Run from the start's step to the end: ``(ref, digest)`` of the result."""
        ...

    def commit(self, start: Start, next_denoise_step: int) -> tuple[str, str]:
        """Run from the start's step to before ``next_denoise_step``: ``(ref, digest)`` of the latents."""
        ...


class NoWork:
    """A simulation's work: results are named after their request, so that equal ones agree."""

    def finish(self, start: Start) -> tuple[str, str]:
        return start.request.id, start.request.id

    def commit(self, start: Start, next_denoise_step: int) -> tuple[str, str]:
        name = f"{start.request.id}@{next_denoise_step}"
        return name, name
