"""Prompt files: what is read, how a broken line is named, and that the shipped ones are sound."""

import json
import re
from pathlib import Path

import pytest

from spotlight_core.config import (
    ClipScoreRewardConfig,
    GenEvalRewardConfig,
    OcrRewardConfig,
    RewardPart,
    WeightedRewardConfig,
)
from spotlight_core.data.prompts import Split, prompt_file, quoted_target, read_prompts, read_rows
from spotlight_core.data.requirements import reward_checks, row_checks
from spotlight_core.diffusion.tiny.glyphs import WIDTH, check_text, font
from spotlight_core.errors import BadInputError
from spotlight_core.recipes import RECIPES, load_recipe, recipe_names
from spotlight_core.types import PromptRow

PROMPTS = RECIPES / "prompts"
PUBLIC = Path(__file__).parents[4] / "shared" / "data" / "prompts"
needs_public = pytest.mark.skipif(not PUBLIC.is_dir(), reason=f"no public prompts in {PUBLIC}")
OCR = reward_checks([OcrRewardConfig()])
GENEVAL = reward_checks([GenEvalRewardConfig(type="geneval")])
BOWL = {"tag": "single_object", "include": [{"class": "bowl", "count": 1}], "prompt": "a photo of a bowl"}


def refused(path: Path, *checks: object) -> BadInputError:
    with pytest.raises(BadInputError) as caught:
        read_rows(path, checks)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return caught.value


def test_target_is_what_the_first_two_double_quotes_hold() -> None:
    assert quoted_target('A ticket that reads "407"') == "407"
    assert quoted_target('"12" beside "34"') == "12"
    assert quoted_target('A sign that says " 7 "') == " 7 "


@pytest.mark.parametrize("prompt", ["A ticket", 'A "', 'An empty ""', 'A blank "  "', "A 'single' quote"])
def test_prompt_without_a_target_is_refused_with_an_example(prompt: str) -> None:
    with pytest.raises(BadInputError) as caught:
        quoted_target(prompt)
    assert repr(prompt) in caught.value.problem
    assert 'A sign that reads "407"' in caught.value.remedy


@pytest.mark.parametrize("ending", ["", "\n", "\r\n", "\n\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_prompts_keep_their_order_and_blank_lines_do_not_count(
    tmp_path: Path, ending: str, mark: str
) -> None:
    file = tmp_path / "train.txt"
    file.write_bytes(f'{mark}A bib with "1"\r\n\nA bus with "é2"\nA bib with "1"{ending}'.encode())
    rows = read_prompts(tmp_path, "train")
    assert [row.text for row in rows] == ['A bib with "1"', 'A bus with "é2"', 'A bib with "1"']
    assert [dict(row.metadata) for row in rows] == [{}, {}, {}]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x0b", "\x0c", "\x85", "\x1c", "\r"])
def test_only_a_line_feed_ends_a_prompt(tmp_path: Path, separator: str) -> None:
    text = f'A sign{separator}with "1"'
    (tmp_path / "train.txt").write_bytes(f"{text}\nA bus\n".encode())
    assert [row.text for row in read_prompts(tmp_path, "train")] == [text, "A bus"]
    row = {"prompt": text}
    (tmp_path / "test_metadata.jsonl").write_bytes(json.dumps(row, ensure_ascii=False).encode())
    if ord(separator) >= 0x20:  # JSON escapes the others
        assert [row.text for row in read_prompts(tmp_path, "test")] == [text]


def test_a_row_of_metadata_keeps_all_but_its_prompt(tmp_path: Path) -> None:
    (tmp_path / "test_metadata.jsonl").write_text(f"{json.dumps(BOWL)}\n\n{json.dumps(BOWL)}")
    metadata = {"tag": "single_object", "include": [{"class": "bowl", "count": 1}]}
    assert read_prompts(tmp_path, "test", GENEVAL) == [
        PromptRow(text="a photo of a bowl", metadata=metadata),
        PromptRow(text="a photo of a bowl", metadata=metadata),
    ]


def test_a_line_without_quotes_is_named_by_file_and_number(tmp_path: Path) -> None:
    file = tmp_path / "train.txt"
    file.write_text('A bib with "1"\n\nA bus\n', encoding="utf-8")
    assert len(read_rows(file)) == 2
    error = refused(file, *OCR)
    assert error.problem == f"{file}:3: no quoted target in prompt 'A bus'"
    assert "double quotes" in error.remedy


@pytest.mark.parametrize(
    ("line", "problem", "remedy"),
    [
        ('{"prompt": "a', "broken JSON (Unterminated string starting at at column 12)", "one whole JSON"),
        ("a photo of a bowl", "broken JSON (Expecting value at column 1)", "one whole JSON object a line"),
        ('["a photo"]', "no text under the key 'prompt'", 'write {"prompt": '),
        ('{"prompt": " "}', "no text under the key 'prompt'", 'write {"prompt": '),
        ('{"text": "a"}', "no text under the key 'prompt'", 'write {"prompt": '),
        ('{"prompt": 3}', "no text under the key 'prompt'", 'write {"prompt": '),
        ('{"prompt": "a", "x": ' + "[" * 200_000, "brackets nested more than 32 deep", "a flat JSON object"),
        (
            '{"prompt": "a", "x": ' + "[" * 32 + "]" * 32 + "}",
            "brackets nested more than 32 deep",
            "a flat JSON object",
        ),
        ('{"prompt": "a", "x": ' + "9" * 5000 + "}", "a number that is too long", "fewer digits"),
        (r'{"prompt": "a \ud83d cat"}', r"\ud83d alone is no character", "write the whole pair"),
        (r'{"prompt": "a", "x": {"\ude00": 1}}', r"\ude00 alone is no character", "write the whole pair"),
    ],
)
def test_a_broken_json_line_is_named(tmp_path: Path, line: str, problem: str, remedy: str) -> None:
    file = tmp_path / "test_metadata.jsonl"
    file.write_text(f"{json.dumps(BOWL)}\n{line}\n")
    error = refused(file)
    assert error.problem == f"{file}:2: {problem}"
    assert remedy in error.remedy


def test_metadata_may_nest_and_hold_whole_pairs(tmp_path: Path) -> None:
    file = tmp_path / "test_metadata.jsonl"
    nested = "[" * 31 + "]" * 31
    file.write_text('{"prompt": "a \\ud83d\\ude00", "x": ' + nested + ', "y": ' + "9" * 4000 + "}\n")
    (row,) = read_rows(file)
    assert row.text == "a \U0001f600"
    assert row.metadata["x"] == json.loads(nested)
    assert row.metadata["y"] == 10**4000 - 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tag": "colour"}, "colour"),
        ({"tag": None}, "tag"),
        ({"includ": []}, "includ"),
        ({"include": [{"class": "bowl", "cout": 1}]}, "cout"),
        ({"include": [{"class": "dragon", "count": 1}]}, "dragon"),
        ({"include": []}, "include"),
    ],
)
def test_clauses_that_geneval_cannot_score_are_named(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    file = tmp_path / "train_metadata.jsonl"
    file.write_text(f"{json.dumps(BOWL)}\n{json.dumps(BOWL | change)}\n")
    assert len(read_rows(file)) == 2
    error = refused(file, *GENEVAL)
    assert error.problem.startswith(f"{file}:2: ")
    assert said in error.problem
    assert error.remedy


def test_a_prompt_without_clauses_is_nothing_for_geneval(tmp_path: Path) -> None:
    file = tmp_path / "train.txt"
    file.write_text("a photo of a bowl\n")
    assert refused(file, *GENEVAL).problem.startswith(f"{file}:1: ")


def test_every_reward_of_a_recipe_is_asked_the_held_out_one_and_the_weighted_ones_too() -> None:
    config = load_recipe("quickstart")  # OCR trained, template held out: the same check under two names
    assert len(row_checks(config)) == 2
    clip = ClipScoreRewardConfig(type="clip_score")
    assert reward_checks([clip]) == ()
    weighted = WeightedRewardConfig(
        type="weighted",
        parts=(
            RewardPart(weight=1.0, reward=clip),
            RewardPart(weight=1.0, reward=GenEvalRewardConfig(type="geneval")),
        ),
    )
    assert reward_checks([clip, weighted]) == GENEVAL
    assert len(reward_checks([weighted, OcrRewardConfig()])) == 2


def test_missing_file_folder_empty_file_and_other_encoding_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"absent\.txt: check the path \(No such file or directory\)"):
        read_rows(tmp_path / "absent.txt")
    with pytest.raises(BadInputError, match=r"check the path \(Is a directory\)"):
        read_rows(tmp_path)
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n\n", encoding="utf-8")
    with pytest.raises(BadInputError, match="write one prompt a line"):
        read_rows(empty)
    latin = tmp_path / "latin.txt"
    latin.write_bytes('A café with "1"'.encode("latin-1"))
    with pytest.raises(BadInputError, match=r"not UTF-8 \(byte 5\): save the file as UTF-8"):
        read_rows(latin)


def test_a_split_is_one_file_of_either_format(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"no prompt folder .*absent: set data\.prompts to a folder"):
        prompt_file(tmp_path / "absent", "train")
    with pytest.raises(BadInputError, match="holds no prompts: there is no train split"):
        prompt_file(tmp_path, "train")
    (tmp_path / "test_metadata.jsonl").write_text(json.dumps(BOWL))
    with pytest.raises(BadInputError) as caught:
        prompt_file(tmp_path, "train")
    assert caught.value.problem == f"{tmp_path} holds only test_metadata.jsonl: there is no train split"
    assert caught.value.remedy.startswith("add train.txt, one prompt a line, or train_metadata.jsonl")
    assert prompt_file(tmp_path, "test") == tmp_path / "test_metadata.jsonl"
    (tmp_path / "test.txt").write_text("a bowl\n")
    with pytest.raises(BadInputError, match=r"both test\.txt and test_metadata\.jsonl: keep one"):
        prompt_file(tmp_path, "test")


@needs_public
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_public_ocr_prompts_load_unchanged(tmp_path: Path, split: Split) -> None:
    raw = (PUBLIC / "ocr" / "test.txt").read_bytes()
    (tmp_path / f"{split}.txt").symlink_to((PUBLIC / "ocr" / "test.txt").resolve())
    rows = read_prompts(tmp_path, split, OCR)
    assert len(rows) == 1018
    assert "\n".join(row.text for row in rows).encode() == raw
    targets = [quoted_target(row.text) for row in rows]
    assert {min(map(len, targets)), max(map(len, targets))} == {2, 29}
    assert sum(not target.isascii() for target in targets) == 10


@needs_public
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_public_geneval_rows_load_unchanged(tmp_path: Path, split: Split) -> None:
    public = PUBLIC / "geneval" / "test_metadata.jsonl"
    (tmp_path / f"{split}_metadata.jsonl").symlink_to(public.resolve())
    rows = read_prompts(tmp_path, split, GENEVAL)
    assert len(rows) == 2212
    assert len({row.text for row in rows}) == 553
    written = [json.loads(line) for line in public.read_text(encoding="utf-8").split("\n") if line]
    assert [dict(row.metadata) | {"prompt": row.text} for row in rows] == written


@pytest.mark.parametrize("name", recipe_names())
def test_the_prompts_of_every_shipped_recipe_pass_the_checks_of_its_rewards(name: str) -> None:
    config = load_recipe(name)
    rows = {split: read_prompts(config.data.prompts, split, row_checks(config)) for split in SPLITS}
    assert len(rows["test"]) >= 40
    assert len(rows["train"]) >= config.data.prompts_per_iteration
    assert not {row.text for row in rows["train"]} & {row.text for row in rows["test"]}


SPLITS: tuple[Split, Split] = ("train", "test")


def test_shipped_signs_hold_one_target_that_is_not_both_trained_and_tested() -> None:
    targets = {}
    for split, count in (("train", 300), ("test", 100)):
        rows = read_rows(PROMPTS / "signs" / f"{split}.txt", OCR)
        assert len({row.text for row in rows}) == count
        assert all(len(re.findall('"', row.text)) == 2 for row in rows)
        targets[split] = {quoted_target(row.text) for row in rows}
    assert not targets["train"] & targets["test"]


def test_shipped_objects_hold_every_tag_of_the_public_set() -> None:
    for split, count in (("train", 300), ("test", 100)):
        rows = read_rows(PROMPTS / "objects" / f"{split}_metadata.jsonl", GENEVAL)
        assert len({row.text for row in rows}) == count
        tags = {"single_object", "two_object", "counting", "colors", "position", "color_attr"}
        assert {row.metadata["tag"] for row in rows} == tags


def test_shipped_digits_are_drawable_of_mixed_length_and_never_both_trained_and_tested() -> None:
    train, test = (
        [quoted_target(row.text) for row in read_rows(PROMPTS / "digits" / f"{name}.txt")]
        for name in ("train", "test")
    )
    assert len(test) >= 384
    assert len(train) >= 384
    assert set(train) & set(test) == set()
    assert len(set(test)) == len(test)
    for targets in (train, test):
        assert {len(target) for target in targets} == {2, 3, 4}
        for target in targets:
            assert check_text(target) == target
            assert font().getlength(target) <= WIDTH
