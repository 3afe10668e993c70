"""Recipes: merging, overrides, and one clear line with the remedy for each mistake."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from spotlight_core.config import (
    CpsConfig,
    FixedArmConfig,
    FixedWindowConfig,
    FlowSdeConfig,
    GrpoConfig,
    NftConfig,
    ProgressiveWindowConfig,
    RandomWindowConfig,
    RunConfig,
    flattened,
)
from spotlight_core.data.prompts import prompt_file
from spotlight_core.errors import BadInputError
from spotlight_core.recipes import RECIPES, find_recipe, load_recipe, recipe_names

Write = Callable[[str, str], Path]

BASE = """
iterations = 3
[data]
prompts = "prompts"
"""
SDE = '[loss]\ntype = "grpo"\n[sampler]\ntype = "flow_sde"\n'


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return written


def refused(path: Path, *overrides: str) -> BadInputError:
    with pytest.raises(BadInputError) as caught:
        load_recipe(str(path), overrides)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    return caught.value


def test_a_recipe_is_named_after_its_file_and_paths_lie_beside_it(write: Write, tmp_path: Path) -> None:
    config = load_recipe(str(write("mine.toml", BASE)))
    assert config.name == "mine"
    assert config.iterations == 3
    assert config.data.prompts == tmp_path / "prompts"
    assert isinstance(config.loss, NftConfig)
    assert load_recipe(str(write("other.toml", 'name = "a.b-1"\n' + BASE))).name == "a.b-1"


def test_the_resolved_recipe_reads_back_as_itself(write: Write) -> None:
    config = load_recipe(
        str(write("mine.toml", BASE + SDE + 'window = {type = "random", size = 2, end = 5}\n'))
    )
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    with pytest.raises(ValidationError, match="frozen"):
        config.iterations = 4  # type: ignore[misc]


def test_extends_merges_table_by_table_and_the_nearer_file_wins(write: Write, tmp_path: Path) -> None:
    write("base/root.toml", BASE + '[optimizer]\nlr = 1e-3\neps = 1e-6\n[loss]\ntype = "nft"\nbeta = 0.5\n')
    write("base/middle.toml", 'extends = "root"\niterations = 5\n[optimizer]\nlr = 2e-3\n')
    config = load_recipe(
        str(write("leaf.toml", 'extends = "base/middle"\n[optimizer]\nweight_decay = 0.0\n'))
    )
    assert (config.name, config.iterations) == ("leaf", 5)
    assert config.optimizer.lr == 2e-3
    assert config.optimizer.eps == 1e-6
    assert config.optimizer.weight_decay == 0.0
    assert config.loss == NftConfig(beta=0.5)
    # A path belongs to the file that wrote it, not to the one that extends it.
    assert config.data.prompts == tmp_path / "base" / "prompts"


def test_another_type_replaces_the_whole_table(write: Write) -> None:
    write("root.toml", BASE + '[loss]\ntype = "nft"\nbeta = 0.5\n')
    leaf = write("leaf.toml", 'extends = "root"\n' + SDE)
    assert load_recipe(str(leaf)).loss == GrpoConfig(type="grpo")
    again = load_recipe(str(leaf), ["loss.type=nft", "loss.beta=0.25"])
    assert again.loss == NftConfig(beta=0.25)


def test_overrides_are_toml_values_or_bare_strings_and_the_last_one_wins(write: Write) -> None:
    config = load_recipe(
        str(write("mine.toml", BASE + "[prices]\nreserved = 9.0\nspot = 3.0\n")),
        [
            "name=other",
            "iterations=7",
            "iterations = 8",
            "optimizer.betas=[0.5, 0.75]",
            "exploration.type='fixed_arm'",
            "exploration.seeds_per_prompt=16",
            "prices.spot=2.5",
            "fleet.trace=/elsewhere/trace.csv",
        ],
    )
    assert (config.name, config.iterations) == ("other", 8)
    assert config.optimizer.betas == (0.5, 0.75)
    assert isinstance(config.exploration, FixedArmConfig)
    assert config.exploration.seeds_per_prompt == 16
    assert config.prices == {"reserved": 9.0, "spot": 2.5}
    assert config.fleet.trace == Path("/elsewhere/trace.csv")


@pytest.mark.parametrize("assignment", ["iterations", "=3", " = 3"])
def test_an_override_that_is_no_assignment_is_refused(write: Write, assignment: str) -> None:
    error = refused(write("mine.toml", BASE), assignment)
    assert error.problem == f"override {assignment!r} is not key=value"


def test_an_unknown_recipe_is_answered_with_those_there_are() -> None:
    with pytest.raises(BadInputError) as caught:
        find_recipe("quickstat")
    assert caught.value.problem == "no recipe 'quickstat'"
    assert "quickstart" in caught.value.remedy


def test_a_file_that_is_no_toml_is_refused_with_the_place(write: Write) -> None:
    error = refused(write("mine.toml", "iterations = = 3\n"))
    assert "mine.toml is not valid TOML" in error.problem
    assert "line 1" in error.remedy


@pytest.mark.parametrize(
    ("line", "problem", "remedy"),
    [
        ("itertions = 4\n", "unknown key 'itertions'", "did you mean 'iterations'?"),
        ("[optimizer]\nlearning = 1\n", "unknown key 'optimizer.learning'", "remove it"),
        ("[optimizer]\nmax_grad_nrom = 1\n", "'optimizer.max_grad_nrom'", "did you mean 'max_grad_norm'?"),
        ("[fleet]\nspot_node = 1\n", "'fleet.spot_node'", "did you mean 'spot_nodes'?"),
        ('[loss]\ntype = "grpo"\nclip_hi = 1\n', "clip_hi", "did you mean 'clip_high'?"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(
    write: Write, line: str, problem: str, remedy: str
) -> None:
    error = refused(write("mine.toml", line + BASE if "[" not in line else BASE + line))
    assert error.problem.startswith("mine.toml: unknown key")
    assert problem in error.problem
    assert error.remedy == remedy


def test_a_missing_key_is_named(write: Write) -> None:
    assert str(refused(write("mine.toml", "iterations = 3\n"))) == "mine.toml: 'data' is missing: add it"
    assert "'data.prompts' is missing" in str(refused(write("mine.toml", "iterations = 3\n[data]\n")))


@pytest.mark.parametrize(
    ("override", "key", "why"),
    [
        ("iterations=many", "iterations", "valid integer"),
        ("iterations=0", "iterations", "greater than or equal to 1"),
        ("name=a/b", "name", "pattern"),
        ("decisions=later", "decisions", "'planned', 'live' or 'replayed'"),
        ("data.seeds_per_prompt=1", "data.seeds_per_prompt", "greater than or equal to 2"),
        ("optimizer.lr=0.0", "optimizer.lr", "greater than 0"),
        ("optimizer.lr=nan", "optimizer.lr", "finite number"),
        ("ema.decay=1.0", "ema.decay", "less than 1"),
        ("services.prefect_port=70000", "services.prefect_port", "65535"),
        ("model.type=sana", "model.type", "'tiny'"),
        ("fleet.spot_nodes=-1", "fleet.spot_nodes", "greater than or equal to 0"),
        ("sampler.type=heun", "sampler.type", "'flow_sde'"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_is_allowed(
    write: Write, override: str, key: str, why: str
) -> None:
    error = refused(write("mine.toml", BASE), override)
    assert error.problem.startswith(f"mine.toml: {key} = ")
    assert why in error.remedy


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[prices]\nspot = 1.0\n", "no entry for pool 'reserved': add prices.reserved = USD per GPU-hour"),
        ("[prices]\nreserved = 1.0\n", "no entry for pool 'spot'"),
        ("[prices]\nreserved = 1.0\nspot = 1.0\nidle = 1.0\n", "prices.idle: unknown pool"),
        ("[prices]\nreserved = 1.0\nspot = -0.5\n", "prices.spot = -0.5: give USD per GPU-hour, 0 or more"),
        ("[prices]\nreserved = nan\nspot = 0.5\n", "prices.reserved = nan"),
        ("[prices]\nreserved = inf\nspot = 0.5\n", "prices.reserved = inf"),
        ('[loss]\ntype = "grpo"\n', "set sampler.type = 'flow_sde'"),
        ('[exploration]\ntype = "fixed_arm"\neffective_steps = 11\n', "effective_steps = 11 exceeds"),
        ('[exploration]\ntype = "fixed_arm"\nseeds_per_prompt = 4\n', "seeds_per_prompt = 4 is below"),
        ('[exploration]\ntype = "fixed_arm"\nunexplored_prompts = 8\n', "leaves no prompt to explore"),
    ],
)
def test_an_inconsistent_pair_is_explained(write: Write, text: str, why: str) -> None:
    assert why in str(refused(write("mine.toml", BASE + text)))


def test_a_pool_without_nodes_needs_no_price(write: Write) -> None:
    config = load_recipe(
        str(write("mine.toml", BASE + "[fleet]\nspot_nodes = 0\n[prices]\nreserved = 1.0\n"))
    )
    assert config.prices == {"reserved": 1.0}


@pytest.mark.parametrize(
    ("window", "inside"),
    [
        ('{type = "fixed", end = 10}', "a window of 1 in [0, 10) must lie inside [0, 9)"),
        ('{type = "fixed", first = 3, end = 3}', "a window of 1 in [3, 3)"),
        ('{type = "fixed", first = 5, end = 2}', "a window of 1 in [5, 2)"),
        ('{type = "random", size = 3, first = 2, end = 4}', "a window of 3 in [2, 4)"),
        ('{type = "random", end = 10}', "a window of 2 in [0, 10)"),
        ('{type = "progressive", size = 10}', "a window of 10 in [0, 9)"),
    ],
)
def test_a_window_outside_the_sde_steps_is_refused(write: Write, window: str, inside: str) -> None:
    error = refused(write("mine.toml", BASE + SDE + f"window = {window}\n"))
    assert inside in error.remedy


def test_trained_steps_are_the_window_or_all_but_the_last() -> None:
    windows = {
        9: None,
        2: FixedWindowConfig(type="fixed", first=3, end=5),
        3: RandomWindowConfig(type="random", size=3, end=5),
        4: ProgressiveWindowConfig(type="progressive"),
    }
    for trained, window in windows.items():
        assert FlowSdeConfig(type="flow_sde", window=window).trained_per_sample == trained
        assert CpsConfig(type="cps", noise_level=0.0, window=window).trained_per_sample == 0


def test_every_field_of_every_section_is_documented() -> None:
    def check(schema: dict[str, object], name: str) -> list[str]:
        properties = schema.get("properties", {})
        assert isinstance(properties, dict)
        return [f"{name}.{key}" for key, value in properties.items() if "description" not in value]

    schema = RunConfig.model_json_schema()
    bare = [key for name, section in schema["$defs"].items() for key in check(section, name)]
    bare += check(schema, "RunConfig")
    # A table is documented by its fields, and ``type`` by the table's own line.
    tables = {f"RunConfig.{key}" for key in ("model", "data", "sampler", "reward", "loss", "advantage")}
    tables |= {
        f"RunConfig.{key}"
        for key in (
            "optimizer",
            "trainer",
            "ema",
            "exploration",
            "evaluation",
            "fleet",
            "elastic",
            "services",
        )
    }
    tables |= {"FleetConfig.notices", "FleetConfig.store"}
    assert set(bare) - tables == set()


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_load_and_their_files_exist(name: str) -> None:
    config = load_recipe(name)
    assert config.name == name
    assert find_recipe(name) == RECIPES / f"{name}.toml"
    assert prompt_file(config.data.prompts, "train").is_file()
    assert prompt_file(config.data.prompts, "test").is_file()
    assert config.fleet.trace is None or config.fleet.trace.is_file()


def test_flattened_keys_are_dotted_and_complete(write: Write) -> None:
    config = load_recipe(str(write("mine.toml", BASE)))
    flat = flattened(config)
    assert flat["optimizer.lr"] == "0.0003"
    assert json.loads(flat["optimizer.betas"]) == [0.9, 0.999]
    assert flat["loss.type"] == "nft"
    assert flat["prices.spot"] == "2.87"

    def leaves(tree: object) -> int:
        return sum(map(leaves, tree.values())) if isinstance(tree, dict) else 1

    assert len(flat) == leaves(config.model_dump(mode="json"))


def test_a_recipe_may_extend_the_shipped_one_of_its_own_name(tmp_path: Path) -> None:
    recipe = tmp_path / "quickstart.toml"
    recipe.write_text('extends = "quickstart"\niterations = 3\n', encoding="utf-8")
    assert load_recipe(str(recipe)).iterations == 3


def test_circles_and_nonsense_in_extends_are_refused(tmp_path: Path) -> None:
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.write_text('extends = "two"\n', encoding="utf-8")
    two.write_text('extends = "one"\n', encoding="utf-8")
    with pytest.raises(BadInputError, match="break the circle"):
        load_recipe(str(one))
    one.write_text("extends = 3\n", encoding="utf-8")
    with pytest.raises(BadInputError, match="extends = 3"):
        load_recipe(str(one))


def test_one_price_can_be_overridden_alone() -> None:
    assert load_recipe("quickstart", ["prices.spot=1.5"]).prices == {
        "reserved": 10.08,
        "spot": 1.5,
        "on_demand": 10.08,
    }


def test_a_key_of_a_typed_table_is_named_as_it_is_written() -> None:
    with pytest.raises(BadInputError, match=r"exploration\.seeds_per_prompt = 'many'"):
        load_recipe("quickstart", ["exploration.seeds_per_prompt=many"])


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.lr=inf",
        "optimizer.betas=[2, 3]",
        "fleet.spot_nodes=1000",
        "data.prompts_per_iteration=100000000",
        "sampler.denoise_steps=1000000000",
        "rng_seed=-1",
        "name=mlflow.db",
        f"name={'x' * 200}",
        "data.prompts=",
    ],
)
def test_nonsense_is_refused_before_it_costs_anything(override: str) -> None:
    with pytest.raises(BadInputError):
        load_recipe("quickstart", [override])
