"""Recipes beyond one table: unions in unions, lists, models by hub id or folder, and the shipped presets."""

from pathlib import Path

import pytest

from spotlight_core.config import (
    DiffusersModelConfig,
    FunctionRewardConfig,
    GrpoConfig,
    LoraConfig,
    NftConfig,
    ProgressiveWindowConfig,
    RandomWindowConfig,
    RewardPart,
    RunConfig,
    WeightedRewardConfig,
)
from spotlight_core.recipes import RECIPES, load_recipe, recipe_names
from tests.core.least_recipe import BASE, REWARDS, refused, write_recipe

MODEL = "model={type='qwen_image', path='Qwen/Qwen-Image', lora={rank=4}}"
SAMPLER = "sampler={type='flow_sde', window={type='random', size=2}}"


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return write_recipe(tmp_path)


@pytest.mark.parametrize(
    ("table", "key", "nearest"),
    [
        (SAMPLER, "sampler.window.sise", "size"),
        (SAMPLER, "sampler.nois_level", "noise_level"),
        (REWARDS, "reward.parts.0.wieght", "weight"),
        (REWARDS, "reward.parts.0.reward.charcters", "characters"),
        (REWARDS, "reward.parts.1.reward.fil", "file"),
        (MODEL, "model.lora.rnak", "rank"),
        (MODEL, "model.heigth", "height"),
        ("evaluation.held_out_reward={type='clip_score'}", "evaluation.held_out_reward.devise", "device"),
        ("fleet.spot_nodes=1", "fleet.max_attemts", "max_attempts"),
        # ``type`` is a key as well, and ``path`` is nearer to this than any key of another section.
        ("evaluation.held_out_reward={type='clip_score'}", "evaluation.held_out_reward.pat", "path"),
        ("reward.detect=true", "reward.typ", "type"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_of_its_own_table(
    recipe: str, table: str, key: str, nearest: str
) -> None:
    error = refused(recipe, table, f"{key}=1")
    assert error.problem == f"mine.toml: unknown key {key!r}"
    assert error.remedy == f"did you mean {nearest!r}?"


def test_a_key_of_another_type_or_section_is_told_as_that(recipe: str) -> None:
    window = refused(recipe, "sampler.window={type='fixed', end=2}")
    assert window.remedy == (
        "only type 'flow_sde' or 'dance_sde' or 'cps' has it: remove it or change the type"
    )
    assert refused(recipe, "fleet.lr=1e-4").remedy == "did you mean 'optimizer.lr'?"
    assert refused(recipe, "clip_high=1e-4").remedy == "did you mean 'loss.clip_high'?"
    assert refused(recipe, "fleet.colour=1").remedy == "remove it"


def test_a_table_that_needs_a_type_lists_them(recipe: str) -> None:
    error = refused(recipe, "evaluation.held_out_reward={file='x.py'}")
    assert error.problem == "mine.toml: 'evaluation.held_out_reward' has no type"
    assert error.remedy.startswith("add type = one of 'ocr', 'template', 'jpeg_size', 'function', 'geneval'")
    unknown = refused(recipe, "sampler={type='cps', window={type='randm'}}")
    assert str(unknown) == (
        "mine.toml: sampler.window.type = 'randm' is not usable: give one of 'fixed', 'random', 'progressive'"
    )


def test_a_fault_of_a_whole_table_names_its_key_and_says_why(recipe: str) -> None:
    error = refused(recipe, "model={type='wan', path='a/b', frames=4}")
    assert str(error) == "mine.toml: model is not usable: frames = 4 is not 4 n + 1: give 1, 5, 9, ..."
    error = refused(recipe, "reward={type='ocr', engine='paddleocr'}")
    assert str(error) == (
        "mine.toml: reward is not usable: engine paddleocr reads found lines only: set detect = true"
    )
    error = refused(recipe, "model={type='flux', path='a/b', negative_prompt='blurred'}")
    assert str(error) == (
        "mine.toml: model is not usable: negative_prompt = 'blurred' has no use in FLUX, whose guidance is "
        "distilled into the transformer: leave it out"
    )


@pytest.mark.parametrize(
    ("family", "most"), [("qwen_image", 1024), *((each, 512) for each in ("flux", "sd3", "wan"))]
)
def test_a_prompt_has_no_more_tokens_than_the_family_takes(recipe: str, family: str, most: int) -> None:
    def model(tokens: int) -> str:
        return f"model={{type='{family}', path='a/b', max_text_tokens={tokens}}}"

    assert load_recipe(recipe, [model(most)]).model.type == family
    assert f"model.max_text_tokens = {most + 1}" in refused(recipe, model(most + 1)).problem


def test_one_key_of_a_nested_table_or_of_a_list_is_overridden_alone(recipe: str, tmp_path: Path) -> None:
    config = load_recipe(recipe, [MODEL, "model.lora.rank=8", REWARDS, "reward.parts.1.weight=2"])
    assert config.model.lora == LoraConfig(rank=8)
    assert isinstance(config.reward, WeightedRewardConfig)
    assert [part.weight for part in config.reward.parts] == [1.0, 2.0]
    assert load_recipe(recipe, ["model.lora.rank=8"]).model.lora == LoraConfig(rank=8)
    beyond = refused(recipe, REWARDS, "reward.parts.2.weight=2")
    assert str(beyond) == "an override sets place 2 of a list of 2: count places from 0"


def test_none_drops_what_may_be_absent_and_nothing_else(recipe: str) -> None:
    config = load_recipe(recipe, [MODEL, "model.lora=none", SAMPLER, "sampler.window=none"])
    assert config.model.lora is None
    assert config.sampler.type == "flow_sde"
    assert config.sampler.window is None
    assert load_recipe(recipe, ["exploration.type=none"]).exploration.type == "none"
    assert "valid integer" in refused(recipe, "iterations=none").remedy


def test_a_local_model_lies_beside_its_recipe_and_a_hub_id_stays_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Qwen" / "Qwen-Image").mkdir(parents=True)
    (tmp_path / "deep").mkdir()
    local = BASE + '[model]\ntype = "qwen_image"\npath = "Qwen/Qwen-Image"\n'
    (tmp_path / "local.toml").write_text(local, encoding="utf-8")
    (tmp_path / "deep" / "hub.toml").write_text(local, encoding="utf-8")

    def path(name: str, *overrides: str) -> str:
        model = load_recipe(str(tmp_path / name), overrides).model
        assert isinstance(model, DiffusersModelConfig)
        return model.path

    assert path("local.toml") == str(tmp_path / "Qwen" / "Qwen-Image")
    assert path("deep/hub.toml") == "Qwen/Qwen-Image"
    # An override belongs to where the command is given.
    monkeypatch.chdir(tmp_path)
    assert path("deep/hub.toml", "model.path=Qwen/Qwen-Image") == str(tmp_path / "Qwen" / "Qwen-Image")
    monkeypatch.chdir(tmp_path / "deep")
    assert path("deep/hub.toml", "model.path=Qwen/Qwen-Image") == "Qwen/Qwen-Image"


def test_files_of_rewards_lie_beside_their_recipe_wherever_they_are_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "clip").mkdir()
    text = BASE + (
        '[reward]\ntype = "weighted"\n[[reward.parts]]\nweight = 1.0\n'
        'reward = { type = "function", file = "mine.py" }\n'
        '[evaluation.held_out_reward]\ntype = "clip_score"\npath = "clip"\n'
    )
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    config = load_recipe(str(tmp_path / "mine.toml"))
    function = FunctionRewardConfig(type="function", file=tmp_path / "mine.py")
    assert config.reward == WeightedRewardConfig(
        type="weighted", parts=(RewardPart(weight=1.0, reward=function),)
    )
    assert config.evaluation.held_out_reward.path == str(tmp_path / "clip")  # type: ignore[union-attr]
    monkeypatch.chdir(tmp_path / "clip")
    again = load_recipe(str(tmp_path / "mine.toml"), ["reward={type='function', file='own.py'}"])
    assert again.reward == FunctionRewardConfig(type="function", file=tmp_path / "clip" / "own.py")
    assert (
        "names no path in reward.file"
        in refused(str(tmp_path / "mine.toml"), "reward={type='function', file=''}").problem
    )


def test_a_loss_that_regulates_by_the_sampler_says_why_another_does_not_do() -> None:
    error = refused("flux_grpo_guard", "sampler={type='cps'}")
    assert "grpo_guard regulates the ratio with flow_sde's step std and -dt, which cps does not have" in str(
        error
    )


# -- the shipped ones --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_begins_with_what_it_is_and_reads_back_as_itself(name: str) -> None:
    first = (RECIPES / f"{name}.toml").read_text(encoding="utf-8").split("\n", 1)[0]
    assert first.startswith("# ")
    assert first.endswith(".")
    assert 20 < len(first) <= 110
    config = load_recipe(name)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert max(config.evaluation.images, config.evaluation.final_images) <= len(_test_prompts(config))


def _test_prompts(config: RunConfig) -> list[str]:
    [path] = config.data.prompts.glob("test*")
    return path.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("name", "path", "guidance", "group", "steps"),
    [
        ("sd3_flow_grpo", "stabilityai/stable-diffusion-3.5-medium", 4.5, (24, 48), (10, 40)),
        ("sd3_ocr", "stabilityai/stable-diffusion-3.5-medium", 4.5, (24, 48), (10, 40)),
        ("sd3_nft", "stabilityai/stable-diffusion-3.5-medium", 1.0, (24, 48), (10, 40)),
        ("qwen_image_ocr", "Qwen/Qwen-Image", 4.0, (16, 32), (10, 50)),
        ("qwen_image_fast", "Qwen/Qwen-Image", 1.0, (16, 32), (10, 50)),
        ("flux_grpo_guard", "black-forest-labs/FLUX.1-dev", 3.5, (24, 48), (10, 40)),
        ("flux_mixgrpo", "black-forest-labs/FLUX.1-dev", 3.5, (12, 32), (25, 40)),
        ("wan_dance", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", 5.0, (8, 16), (20, 50)),
    ],
)
def test_presets_are_those_of_the_published_recipes(
    name: str, path: str, guidance: float, group: tuple[int, int], steps: tuple[int, int]
) -> None:
    config = load_recipe(name)
    model = config.model
    assert isinstance(model, DiffusersModelConfig)
    assert (model.path, model.guidance) == (path, guidance)  # type: ignore[attr-defined]
    assert (config.data.seeds_per_prompt, config.data.prompts_per_iteration) == group
    assert (config.sampler.denoise_steps, config.evaluation.denoise_steps) == steps
    assert (model.rollout_dtype, model.training_dtype) == ("bf16", "bf16")
    assert (config.optimizer.weight_decay, config.optimizer.max_grad_norm) == (1e-4, 1.0)
    assert config.advantage.clip == 5.0
    assert config.evaluation.held_out_reward.type not in {config.reward.type, "template"}
    if name != "wan_dance":
        assert (model.height, model.width, config.optimizer.lr) == (512, 512, 3e-4)


def test_what_differs_between_the_presets_of_a_family() -> None:
    flow, nft = load_recipe("sd3_flow_grpo"), load_recipe("sd3_nft")
    assert (flow.sampler.type, flow.sampler.noise_level) == ("flow_sde", 0.7)  # type: ignore[union-attr]
    assert flow.loss == GrpoConfig(type="grpo", clip_low=1e-4, clip_high=1e-4, kl_weight=0.04)
    assert (flow.ema.decay, flow.ema.interval) == (0.9, 8)
    assert flow.model.lora == LoraConfig(rank=32, alpha=64)
    assert isinstance(nft.loss, NftConfig)
    assert (nft.loss.beta, nft.loss.old_decay, nft.sampler.type) == (0.1, 2, "ode")

    ocr, fast = load_recipe("qwen_image_ocr"), load_recipe("qwen_image_fast")
    assert (ocr.sampler.type, ocr.sampler.noise_level) == ("flow_sde", 1.2)  # type: ignore[union-attr]
    assert ocr.sampler.window == RandomWindowConfig(type="random", size=2, first=0, end=5)  # type: ignore[union-attr]
    assert (fast.sampler.type, fast.sampler.noise_level) == ("cps", 0.8)  # type: ignore[union-attr]
    assert fast.sampler.window == RandomWindowConfig(type="random", size=3, first=0, end=5)  # type: ignore[union-attr]
    for config in (ocr, fast):
        assert config.loss == GrpoConfig(type="grpo", clip_low=1e-5, clip_high=1e-5, kl_weight=0.0)
        assert config.ema.decay == 0.0
        assert config.model.lora is not None
        assert (config.model.lora.rank, config.model.lora.alpha) == (64, 128)
        assert "img_mlp.net.0.proj" in config.model.lora.target_modules

    guard, mix = load_recipe("flux_grpo_guard"), load_recipe("flux_mixgrpo")
    assert (guard.loss.type, guard.loss.clip_low) == ("grpo_guard", 2e-6)  # type: ignore[union-attr]
    assert isinstance(mix.sampler.window, ProgressiveWindowConfig)  # type: ignore[union-attr]
    assert load_recipe("wan_dance").sampler.type == "dance_sde"
