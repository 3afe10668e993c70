"""The denoise engine on the embedded transformer (untrained: bits do not care what is drawn)."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from spotlight_core.config import FlowSdeConfig, OdeConfig, SamplerConfig
from spotlight_core.diffusion.engine import (
    Arrays,
    DenoiseEngine,
    Generated,
    Paused,
    arrays_digest,
    from_bytes,
    to_bytes,
)
from spotlight_core.diffusion.noise import INITIAL_NOISE, batch_noise
from spotlight_core.diffusion.samplers import build_flow_sde
from spotlight_core.diffusion.tiny.model import TinyQwenImage, build_transformer
from spotlight_core.errors import BadInputError
from spotlight_core.types import Fidelity, GenerationRequest, PolicyVersion, Prompt

SDE = FlowSdeConfig(type="flow_sde", window=(2, 5))
POLICY = PolicyVersion(label="old", number=0, digest="")


@pytest.fixture(scope="module")
def model() -> TinyQwenImage:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return TinyQwenImage(build_transformer())


def _request(
    *seeds: int, steps: int = 10, reused: tuple[int, ...] = (), stochastic: bool = True
) -> GenerationRequest:
    return GenerationRequest(
        id="r",
        kind="rollout",
        prompts=(Prompt(occurrence="p0", text='A "407"'),),
        seeds=seeds,
        policy=POLICY,
        fidelity=Fidelity(denoise_steps=steps, reused_steps=reused, stochastic=stochastic),
    )


def _stop_before(denoise_step: int) -> Callable[[int, Callable[[], Arrays]], bool]:
    return lambda following, state: following == denoise_step


def _finished(outcome: Generated | Paused) -> Arrays:
    assert isinstance(outcome, Generated)
    return outcome.arrays


@pytest.mark.parametrize(
    "sampler", [OdeConfig(), SDE, FlowSdeConfig(type="flow_sde")], ids=["ode", "window", "sde"]
)
def test_resuming_at_any_step_is_bit_identical(model: TinyQwenImage, sampler: SamplerConfig) -> None:
    engine = DenoiseEngine(model, sampler, rng_seed=3)
    request = _request(0, 1, 2, reused=(3, 7, 9))
    whole = arrays_digest(_finished(engine.generate(request)))
    for denoise_step in range(1, 10):
        paused = engine.generate(request, boundary=_stop_before(denoise_step))
        assert isinstance(paused, Paused)
        assert paused.next_denoise_step == denoise_step
        state = from_bytes(to_bytes(paused.state))
        assert arrays_digest(state) == arrays_digest(paused.state)
        elsewhere = DenoiseEngine(model, sampler, rng_seed=3)
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
    arrays = _finished(DenoiseEngine(model, SDE, rng_seed=0).generate(_request(0, 1)))
    assert arrays["x_TBSC"].shape == (4, 2, 8, 64)
    assert arrays["logp_TB"].shape == (3, 2)
    assert arrays["images"].shape == (2, 16, 32, 3)
    assert arrays["images"].dtype == np.uint8
    sampler, text = build_flow_sde(SDE), model.encode(['A "407"'] * 2)
    with torch.inference_mode():
        for index, denoise_step in enumerate(sampler.trained_steps):
            x, following = (torch.from_numpy(arrays["x_TBSC"][index + offset]) for offset in (0, 1))
            v = model.velocity(x, torch.full((2,), float(sampler.sigmas[denoise_step])), text)
            log_prob = sampler.log_prob(x, v, following, denoise_step)
            assert log_prob.numpy().tobytes() == arrays["logp_TB"][index].tobytes()


def test_ode_trajectory_equals_a_bare_loop(model: TinyQwenImage) -> None:
    arrays = _finished(
        DenoiseEngine(model, OdeConfig(denoise_steps=4), rng_seed=9).generate(_request(5, 6, steps=4))
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
    monkeypatch.setattr(
        model,
        "velocity",
        lambda x, sigma, text: sigmas.append(round(sigma[0].item(), 3)) or velocity(x, sigma, text),
    )
    DenoiseEngine(model, OdeConfig(), rng_seed=0).generate(_request(0, reused=(2, 4, 6, 8)))
    assert sigmas == [1.0, 0.9, 0.7, 0.5, 0.3, 0.1]


def test_each_row_of_an_evaluation_has_its_own_prompt_and_noise(model: TinyQwenImage) -> None:
    prompts = tuple(Prompt(occurrence=f"held-out-{i}", text=f'A "{i}{i}"') for i in range(3))
    request = GenerationRequest(
        id="e",
        kind="evaluate",
        prompts=prompts,
        seeds=(0, 0, 0),
        policy=POLICY,
        fidelity=Fidelity(denoise_steps=10, stochastic=False),
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
    variants = [
        {"b": np.zeros(4, np.float32)},
        {"a": np.zeros(4, np.int32)},
        {"a": np.zeros((2, 2), np.float32)},
        {"a": np.array([0, 0, 0, 1], np.float32)},
    ]
    assert len({arrays_digest(arrays) for arrays in [base, *variants]}) == 5
    assert arrays_digest({"x": base["a"], "y": base["a"]}) == arrays_digest({"y": base["a"], "x": base["a"]})
