"""The nouns are frozen, keyword-only and slotted, and pickle unchanged across processes."""

import dataclasses
import pickle

import pytest

from spotlight_core import errors, types
from spotlight_core.types import Fidelity, GenerationRequest, PolicyVersion, Prompt

NOUNS = [noun for noun in vars(types).values() if dataclasses.is_dataclass(noun)]
ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.SpotlightError)
]


@pytest.mark.parametrize("noun", NOUNS, ids=lambda noun: noun.__name__)
def test_nouns_are_frozen_keyword_only_and_slotted(noun: type) -> None:
    assert noun.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert "__slots__" in vars(noun)
    assert all(field.kw_only for field in dataclasses.fields(noun))


def test_policy_version_is_named_by_label_and_number() -> None:
    assert PolicyVersion(label="ema", number=12, digest="ab").name == "ema-12"


def test_effective_steps_are_those_that_are_computed() -> None:
    assert Fidelity(denoise_steps=10, reused_steps=(2, 4, 6, 8)).effective_steps == 6
    assert Fidelity(denoise_steps=10).effective_steps == 10


def test_a_request_pickles_is_hashable_and_names_the_prompt_of_each_row() -> None:
    first, second = (Prompt(occurrence=f"3/{n}", text=f'A ticket that reads "{n}"') for n in (0, 1))
    request = GenerationRequest(
        id="3/rollout/0",
        kind="rollout",
        prompts=(first,),
        seeds=(1, 2),
        policy=PolicyVersion(label="old", number=3, digest="ab"),
        fidelity=Fidelity(denoise_steps=10),
    )
    assert pickle.loads(pickle.dumps(request)) == request
    assert len({request, dataclasses.replace(request), dataclasses.replace(request, seeds=(1, 3))}) == 2
    assert request.prompt == first
    assert request.row_prompts == (first, first)
    assert dataclasses.replace(request, prompts=(first, second)).row_prompts == (first, second)
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.seeds = ()  # type: ignore[misc]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_errors_pickle_and_read_as_one_line_with_the_remedy(kind: type[errors.SpotlightError]) -> None:
    error = pickle.loads(pickle.dumps(kind("port 4200 is in use", "free it or set services.prefect_port")))
    assert type(error) is kind
    assert str(error) == "port 4200 is in use: free it or set services.prefect_port"
    assert error.exit_code == (2 if kind is errors.BadInputError else 1)
