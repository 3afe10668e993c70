"""The denoise engine on the embedded transformer (untrained: bits do not care what is drawn)."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from spotlight_core.arrays import Arrays, arrays_digest, from_bytes, to_bytes
from spotlight_core.config import (
    CpsConfig,
    DanceSdeConfig,
    FixedWindowConfig,
    FlowSdeConfig,
    OdeConfig,
    SamplerConfig,
)
from spotlight_core.diffusion.engine import DenoiseEngine, Generated, Paused
from spotlight_core.diffusion.model import TextEmbeddings
from spotlight_core.diffusion.noise import INITIAL_NOISE, batch_noise
from spotlight_core.diffusion.samplers import build_sde
from spotlight_core.diffusion.tiny.model import TinyQwenImage, build_transformer
from spotlight_core.errors import BadInputError, TrainingError
from spotlight_core.types import Fidelity, GenerationRequest, PolicyVersion, Prompt

WINDOW, EVERYWHERE = (2, 5), (0, 9)
SDE = FlowSdeConfig(type="flow_sde", window=FixedWindowConfig(type="fixed", first=2, end=5))
POLICY = PolicyVersion(label="old", number=0, digest="")


@pytest.fixture(scope="module")
def model() -> TinyQwenImage:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return TinyQwenImage(build_transformer())


def _request(
    *seeds: int, steps: int = 10, reused: tuple[int, ...] = (), sde: tuple[int, int] | None = WINDOW
) -> GenerationRequest:
    return GenerationRequest(
        id="r",
        kind="rollout",
        prompts=(Prompt(occurrence="p0", text='A "407"'),),
        seeds=seeds,
        policy=POLICY,
        fidelity=Fidelity(denoise_steps=steps, reused_steps=reused, sde_steps=sde),
    )


def _stop_before(denoise_step: int) -> Callable[[int, Callable[[], Arrays]], bool]:
    return lambda following, state: following == denoise_step


def _finished(outcome: Generated | Paused) -> Arrays:
    assert isinstance(outcome, Generated)
    return outcome.arrays


@pytest.mark.parametrize(
    ("sampler", "sde"),
    [
        (OdeConfig(), None),
        (SDE, WINDOW),
        (FlowSdeConfig(type="flow_sde"), EVERYWHERE),
        (DanceSdeConfig(type="dance_sde"), WINDOW),
        (CpsConfig(type="cps"), WINDOW),
    ],
    ids=["ode", "window", "everywhere", "dance", "cps"],
)
def test_resuming_at_any_step_is_bit_identical(
    model: TinyQwenImage, sampler: SamplerConfig, sde: tuple[int, int] | None
) -> None:
    engine = DenoiseEngine(model, sampler, rng_seed=3, record_means=True)
    request = _request(0, 1, 2, reused=(3, 7, 9), sde=sde)
    whole = arrays_digest(_finished(engine.generate(request)))
    for denoise_step in range(1, 10):
        paused = engine.generate(request, boundary=_stop_before(denoise_step))
        assert isinstance(paused, Paused)
        assert paused.next_denoise_step == denoise_step
        state = from_bytes(to_bytes(paused.state))
        assert arrays_digest(state) == arrays_digest(paused.state)
        elsewhere = DenoiseEngine(model, sampler, rng_seed=3, record_means=True)
        resumed = elsewhere.generate(request, from_denoise_step=denoise_step, state=state)
        assert arrays_digest(_finished(resumed)) == whole


def test_boundary_is_asked_between_steps_and_taking_states_changes_nothing(model: TinyQwenImage) -> None:
    engine = DenoiseEngine(model, SDE, rng_seed=0)
    asked, states = [], []

    def boundary(following: int, make_state: Callable[[], Arrays]) -> bool:
        asked.append(following)
        states.append(make_state())
        return False

    watched = _finished(engine.generate(_request(0), boundary=boundary))
    assert asked == list(range(1, 10))
    assert arrays_digest(watched) == arrays_digest(_finished(engine.generate(_request(0))))
    assert "logp_TB" not in states[1]
    assert [state["logp_TB"].shape[0] for state in states[2:5]] == [1, 2, 3]
    assert [state["x_TBSC"].shape[0] for state in states[2:5]] == [2, 3, 4]


def test_recorded_window_is_what_replay_needs(model: TinyQwenImage) -> None:
    engine = DenoiseEngine(model, SDE, rng_seed=0, record_means=True)
    arrays = _finished(engine.generate(_request(0, 1)))
    assert arrays["x_TBSC"].shape == (4, 2, 8, 64)
    assert arrays["logp_TB"].shape == (3, 2)
    assert arrays["mean_TBSC"].shape == (3, 2, 8, 64)
    assert arrays["images"].shape == (2, 16, 32, 3)
    assert arrays["images"].dtype == np.uint8
    sampler, text = build_sde(SDE, model.sigmas(10, None)), model.encode(['A "407"'] * 2)
    with torch.inference_mode():
        for index, denoise_step in enumerate(range(*WINDOW)):
            x, following = (torch.from_numpy(arrays["x_TBSC"][index + offset]) for offset in (0, 1))
            v = model.velocity(x, torch.full((2,), float(sampler.sigmas[denoise_step])), text)
            steps_B = torch.full((2,), denoise_step)
            log_prob = sampler.log_prob(x, v, following, steps_B)
            assert log_prob.numpy().tobytes() == arrays["logp_TB"][index].tobytes()
            assert sampler.mean(x, v, steps_B).numpy().tobytes() == arrays["mean_TBSC"][index].tobytes()


def test_means_are_recorded_only_where_they_are_asked_for(model: TinyQwenImage) -> None:
    bare = _finished(DenoiseEngine(model, SDE, rng_seed=0).generate(_request(0)))
    recorded = _finished(DenoiseEngine(model, SDE, rng_seed=0, record_means=True).generate(_request(0)))
    assert set(recorded) - set(bare) == {"mean_TBSC"}
    assert all(bare[name].tobytes() == recorded[name].tobytes() for name in bare)


def test_the_request_says_which_steps_are_stochastic(model: TinyQwenImage) -> None:
    """The window is drawn for each group: the sampler's own is what a request usually carries, no more."""
    engine = DenoiseEngine(model, SDE, rng_seed=0)
    early, late = (_finished(engine.generate(_request(0, sde=sde))) for sde in ((0, 2), (7, 9)))
    assert early["logp_TB"].shape == late["logp_TB"].shape == (2, 1)
    initial = batch_noise(0, ["p0"], [0], INITIAL_NOISE, (8, 64)).numpy()
    assert early["x_TBSC"][0].tobytes() == initial.tobytes()
    assert late["x_TBSC"][0].tobytes() != initial.tobytes()


@pytest.mark.parametrize("sde", [(3, 3), (-1, 2), (8, 10), (0, 10)])
def test_sde_steps_that_hold_the_last_step_or_none_are_refused(
    model: TinyQwenImage, sde: tuple[int, int]
) -> None:
    with pytest.raises(BadInputError, match=r"are not inside \[0, 9\)"):
        DenoiseEngine(model, SDE, rng_seed=0).generate(_request(0, sde=sde))


def test_ode_trajectory_equals_a_bare_loop(model: TinyQwenImage) -> None:
    arrays = _finished(
        DenoiseEngine(model, OdeConfig(denoise_steps=4), rng_seed=9).generate(
            _request(5, 6, steps=4, sde=None)
        )
    )
    x = batch_noise(9, ["p0", "p0"], [5, 6], INITIAL_NOISE, (8, 64))
    text = model.encode(['A "407"'] * 2)
    with torch.inference_mode():
        for sigma in (1.0, 0.75, 0.5, 0.25):
            x = x + model.velocity(x, torch.full((2,), sigma), text) * -0.25
    assert arrays["x0"].tobytes() == x.numpy().tobytes()
    assert set(arrays) == {"images", "x0"}


def test_reused_steps_call_the_model_less(model: TinyQwenImage, monkeypatch: pytest.MonkeyPatch) -> None:
    sigmas: list[float] = []
    velocity = model.velocity

    def recording(x: torch.Tensor, sigma: torch.Tensor, text: TextEmbeddings) -> torch.Tensor:
        sigmas.append(round(sigma[0].item(), 3))
        return velocity(x, sigma, text)

    monkeypatch.setattr(model, "velocity", recording)
    DenoiseEngine(model, OdeConfig(), rng_seed=0).generate(_request(0, reused=(2, 4, 6, 8), sde=None))
    assert sigmas == [1.0, 0.9, 0.7, 0.5, 0.3, 0.1]


def test_each_row_of_an_evaluation_has_its_own_prompt_and_noise(model: TinyQwenImage) -> None:
    prompts = tuple(Prompt(occurrence=f"held-out-{i}", text=f'A "{i}{i}"') for i in range(3))
    request = GenerationRequest(
        id="e",
        kind="evaluate",
        prompts=prompts,
        seeds=(0, 0, 0),
        policy=POLICY,
        fidelity=Fidelity(denoise_steps=10),
    )
    arrays = _finished(DenoiseEngine(model, SDE, rng_seed=0).generate(request))
    assert len({image.tobytes() for image in arrays["images"]}) == 3
    assert "logp_TB" not in arrays


def test_seeds_of_a_group_differ_and_repeat(model: TinyQwenImage) -> None:
    engine = DenoiseEngine(model, SDE, rng_seed=0)
    first = _finished(engine.generate(_request(0, 1, 2, 3)))
    again = _finished(engine.generate(_request(0, 1, 2, 3)))
    assert len({x.tobytes() for x in first["x0"]}) == 4
    assert arrays_digest(first) == arrays_digest(again)


@pytest.mark.parametrize("reused", [(0,), (10,), (3, -1)])
def test_a_step_that_cannot_be_reused_is_refused(model: TinyQwenImage, reused: tuple[int, ...]) -> None:
    with pytest.raises(BadInputError, match="cannot reuse a velocity"):
        DenoiseEngine(model, OdeConfig(), rng_seed=0).generate(_request(0, reused=reused))


def test_an_uncoupled_stochastic_preview_is_refused(model: TinyQwenImage) -> None:
    with pytest.raises(BadInputError, match="shares no noise"):
        DenoiseEngine(model, SDE, rng_seed=0).generate(_request(0, steps=5))


def test_a_start_step_needs_its_state(model: TinyQwenImage) -> None:
    engine = DenoiseEngine(model, OdeConfig(), rng_seed=0)
    with pytest.raises(ValueError, match="cannot start"):
        engine.generate(_request(0), from_denoise_step=3)
    with pytest.raises(ValueError, match="cannot start"):
        engine.generate(_request(0), state={"x_BSC": np.zeros((1, 8, 64), np.float32)})


def test_digest_sees_names_dtypes_shapes_and_values() -> None:
    base = {"a": np.zeros(4, np.float32)}
    variants: list[Arrays] = [
        {"b": np.zeros(4, np.float32)},
        {"a": np.zeros(4, np.int32)},
        {"a": np.zeros((2, 2), np.float32)},
        {"a": np.array([0, 0, 0, 1], np.float32)},
    ]
    assert len({arrays_digest(arrays) for arrays in [base, *variants]}) == 5
    assert arrays_digest({"x": base["a"], "y": base["a"]}) == arrays_digest({"y": base["a"], "x": base["a"]})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_latents_that_are_not_finite_are_never_drawn(value: float) -> None:
    """A black image of NaN would be a score like any other."""
    broken = TinyQwenImage(build_transformer())
    with torch.no_grad():
        next(iter(broken.transformer.parameters())).fill_(value)
    with pytest.raises(TrainingError, match="policy old-0 draws latents that are not finite"):
        DenoiseEngine(broken, OdeConfig(), 0).generate(_request(0, 1, sde=None))
