"""LocalExecutor: real denoising in this process, on the simulator's clock.

The fleet, its preemptions and the order of events are virtual; every latent is computed for real.
So a test can take any node away at any moment and compare the images bit for bit.
"""

from spotlight_core.arrays import Arrays, arrays_digest
from spotlight_core.diffusion.engine import DenoiseEngine, Generated, Paused
from spotlight_core.events import Start
from spotlight_core.simulator.executor import SimExecutor


class EngineWork:
    """``Work`` that runs a denoise engine and keeps what it makes in memory."""

    def __init__(self, engine: DenoiseEngine) -> None:
        self._engine = engine
        self.results: dict[str, Arrays] = {}
        self._states: dict[str, Arrays] = {}

    def finish(self, start: Start) -> tuple[str, str]:
        outcome = self._engine.generate(
            start.request, from_denoise_step=start.from_denoise_step, state=self._state(start)
        )
        assert isinstance(outcome, Generated)
        self.results[start.request.id] = outcome.arrays
        return start.request.id, arrays_digest(outcome.arrays)

    def commit(self, start: Start, next_denoise_step: int) -> tuple[str, str]:
        outcome = self._engine.generate(
            start.request,
            from_denoise_step=start.from_denoise_step,
            state=self._state(start),
            boundary=lambda step, state: step == next_denoise_step,
        )
        assert isinstance(outcome, Paused)
        ref = f"{start.request.id}@{next_denoise_step}"
        self._states[ref] = outcome.state
        return ref, arrays_digest(outcome.state)

    def _state(self, start: Start) -> Arrays | None:
        return None if start.state_ref is None else self._states[start.state_ref]


class LocalExecutor(SimExecutor):
    """A ``SimExecutor`` whose work is real; ``results`` holds the arrays by request id."""

    def __init__(self, engine: DenoiseEngine, **simulated: object) -> None:
        self._engine_work = EngineWork(engine)
        super().__init__(work=self._engine_work, **simulated)  # type: ignore[arg-type]

    @property
    def results(self) -> dict[str, Arrays]:
        return self._engine_work.results
