"""Prompt files: what is read, how a broken line is named, and that the shipped ones are sound."""

from pathlib import Path

import pytest

from spotlight_core.data.prompts import quoted_target, read_prompts
from spotlight_core.diffusion.tiny.glyphs import WIDTH, font
from spotlight_core.diffusion.tiny.model import check_text
from spotlight_core.errors import BadInputError
from spotlight_core.recipes import RECIPES

DIGITS = RECIPES / "prompts" / "digits"


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
def test_prompts_keep_their_order_and_blank_lines_do_not_count(tmp_path: Path, ending: str) -> None:
    file = tmp_path / "train.txt"
    file.write_bytes(f'A bib with "1"\n\nA bus with "é2"\nA bib with "1"{ending}'.encode())
    assert read_prompts(file) == ['A bib with "1"', 'A bus with "é2"', 'A bib with "1"']


def test_broken_line_is_named_by_file_and_number(tmp_path: Path) -> None:
    file = tmp_path / "train.txt"
    file.write_text('A bib with "1"\n\nA bus\n', encoding="utf-8")
    with pytest.raises(BadInputError) as caught:
        read_prompts(file)
    assert caught.value.problem == f"{file}:3: no quoted target in prompt 'A bus'"


def test_missing_file_folder_empty_file_and_other_encoding_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"absent\.txt: check the path \(No such file or directory\)"):
        read_prompts(tmp_path / "absent.txt")
    with pytest.raises(BadInputError, match=r"check the path \(Is a directory\)"):
        read_prompts(tmp_path)
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n\n", encoding="utf-8")
    with pytest.raises(BadInputError, match="write one prompt a line"):
        read_prompts(empty)
    latin = tmp_path / "latin.txt"
    latin.write_bytes('A café with "1"'.encode("latin-1"))
    with pytest.raises(BadInputError, match=r"not UTF-8 \(byte 5\): save the file as UTF-8"):
        read_prompts(latin)


def test_shipped_targets_are_drawable_of_mixed_length_and_never_both_trained_and_tested() -> None:
    train, test = (
        [quoted_target(prompt) for prompt in read_prompts(DIGITS / f"{name}.txt")]
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
