"""Faults of a recipe that are found when it is read, not when the run has begun."""

from pathlib import Path

import pytest

from spotlight_core.recipes import load_recipe
from tests.core.least_recipe import BASE, REWARDS, refused, write_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return write_recipe(tmp_path)


def test_a_table_of_another_type_starts_anew_and_says_so_when_that_leaves_a_key_out(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(BASE + '[model]\ntype = "sd3"\npath = "a/b"\n', encoding="utf-8")
    anew = "add it: [model] has another type now and starts anew, nothing of the table of type 'sd3' is kept"
    error = refused(str(path), "model.type=flux")
    assert (error.problem, error.remedy) == ("mine.toml: 'model.path' is missing", anew)
    child = tmp_path / "child.toml"
    child.write_text('extends = "mine"\n[model]\ntype = "flux"\n', encoding="utf-8")
    assert refused(str(child)).remedy == anew
    assert load_recipe(str(child), ["model.path=c/d"]).model.path == "c/d"  # type: ignore[union-attr]
    assert refused(str(path), "reward.type=function").remedy == "add it"
    parts = refused(str(path), REWARDS, "reward.parts.0.reward.type=function")
    assert parts.problem == "mine.toml: 'reward.parts.0.reward.file' is missing"
    assert parts.remedy.startswith("add it: [reward.parts.0.reward] has another type now")


@pytest.mark.parametrize("many", [2_000, 8_000])
def test_a_recipe_nested_beyond_measure_is_refused(tmp_path: Path, many: int) -> None:
    path = tmp_path / "deep.toml"
    for text in ("x = " + "[" * many + "]" * many, "[" + ".".join("a" * many) + "]\nb = 1"):
        path.write_text(f"{BASE}[reward]\n{text}\n", encoding="utf-8")
        assert "deep.toml" in refused(str(path)).problem
    path.write_text(BASE, encoding="utf-8")
    assert "nested too deep" in refused(str(path), ".".join("a" * many) + "=1").problem
    assert "nested too deep" in refused(str(path), "data.prompts=" + "[" * many).problem


def test_a_number_of_thousands_of_digits_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.toml"
    path.write_text(f"rng_seed = {'9' * 5000}\n" + BASE, encoding="utf-8")
    assert f"{path} is not valid TOML" in refused(str(path)).problem
    path.write_text(BASE, encoding="utf-8")
    assert "rng_seed = '999" in refused(str(path), f"rng_seed={'9' * 5000}").problem


JUDGE = "reward={{type='vlm_judge', model='m', url='http://127.0.0.1:8000/v1', {}}}"
FLUX = "model={{type='flux', path='a/b', {}}}"
GRPO = "loss={{type='grpo', {}}}"
DANCE = "sampler={{type='dance_sde', {}}}"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (JUDGE.format("question='Is it good?'"), "it has no {prompt}: write {prompt} where the prompt goes"),
        (JUDGE.format("question='{prompt} {grade}'"), "it cannot be filled in, nothing goes into {grade}"),
        (JUDGE.format("question='{prompt'"), "it cannot be filled in, expected '}' before end of string"),
        (JUDGE.format("api_key_variable=''"), "at least 1 character"),
        ("reward={type='vlm_judge', model='m', url='http://'}", "'http://' names no host: write it as in"),
        ("reward={type='vlm_judge', model='m', url='http://:80/v1'}", "'http://:80/v1' names no host"),
        ("reward={type='vlm_judge', model='m', url='http://a:b/v1'}", "'http://a:b/v1' is no http address"),
        ("reward={type='vlm_judge', model='', url='http://a/v1'}", "reward.model = '' is not usable"),
        ("model={type='flux', path=''}", "model.path = '' is not usable"),
        (FLUX.format("revision=''"), "model.revision = '' is not usable"),
        ("reward={type='clip_score', path=''}", "reward.path = '' is not usable"),
        ("reward={type='pickscore', processor=''}", "reward.processor = '' is not usable"),
        ("reward={type='geneval', detector=''}", "reward.detector = '' is not usable"),
        ("reward={type='clip_score', device='gpu'}", "reward.device = 'gpu' is not usable"),
        (FLUX.format("lora={target_modules=['']}"), "model.lora.target_modules.0 = '' is not usable"),
        (
            "trainer.device=tpu",
            "trainer.device = 'tpu' is not usable: Input should be 'auto', 'cpu' or 'cuda'",
        ),
        ("trainer.device='cuda:'", "trainer.device = 'cuda:' is not usable"),
        (DANCE.format("noise_level=10.5"), "sampler.noise_level = 10.5 is not usable"),
        ("sampler={type='flow_sde', noise_level=11}", "sampler.noise_level = 11 is not usable"),
        ("sampler.shift=0.001", "sampler.shift = 0.001 is not usable"),
        ("sampler.shift=101", "sampler.shift = 101 is not usable"),
        (GRPO.format("clip_low=1.0"), "loss.clip_low = 1.0 is not usable"),
        ("loss={type='grpo_guard', clip_high=1}", "loss.clip_high = 1 is not usable"),
        (
            "advantage.rewards=normalise_each",
            "advantage.rewards = 'normalise_each' adds the advantages of several rewards, and there is one "
            "(ocr): set advantage.rewards = 'sum'",
        ),
        (FLUX.format("height=8"), "model.height = 8 is not usable: Input should be a multiple of 16"),
        (FLUX.format("width=520"), "model.width = 520 is not usable: Input should be a multiple of 16"),
    ],
)
def test_what_a_run_would_refuse_is_refused_with_the_recipe(recipe: str, override: str, said: str) -> None:
    assert said in str(refused(recipe, override))


def test_the_ends_of_each_range_are_usable(recipe: str) -> None:
    overrides = [
        DANCE.format("noise_level=10, shift=0.01"),
        GRPO.format("clip_low=0.99, clip_high=0.99"),
        "trainer.device=cuda",
        FLUX.format("height=16, width=528"),
        REWARDS,
        "advantage.rewards=normalise_each",
    ]
    config = load_recipe(recipe, overrides)
    assert (config.sampler.shift, config.trainer.device) == (0.01, "cuda")
    judge = load_recipe(recipe, ["reward={type='vlm_judge', model='m', url='https://[::1]:8000/v1/'}"]).reward
    assert judge.url == "https://[::1]:8000/v1"  # type: ignore[union-attr]
