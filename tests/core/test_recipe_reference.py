"""`spotlight keys`: the schema as people look things up in it."""

import pytest

from spotlight_core.config import Section
from spotlight_core.errors import BadInputError
from spotlight_core.recipe_keys import tables_of
from spotlight_core.recipe_reference import reference


def test_a_section_with_its_types_defaults_and_the_tables_in_it() -> None:
    said = reference("sampler")
    assert '[sampler] type = "cps"   Coefficients-preserving sampling' in said
    assert "  noise_level = 0.8                  Share of the noise that is renewed" in said
    assert said.count('[sampler.window] type = "random"') == 1
    assert "  end                                Needed.  Step after the last SDE step." in said
    assert "[optimizer]" not in said


def test_every_key_of_the_schema_is_there_with_its_meaning() -> None:
    said = reference()
    tables = list(Section.__subclasses__())
    while tables:
        table = tables.pop()
        tables += table.__subclasses__()
        for key, field in table.model_fields.items():
            assert field.description or tables_of(field.annotation), f"{table.__name__}.{key}"
            written = f"{key}]" if tables_of(field.annotation) else f"\n  {key}"
            assert key == "type" or written in said


def test_an_unknown_section_names_the_nearest() -> None:
    with pytest.raises(BadInputError, match=r"no section 'samplr'.*give one of sampler"):
        reference("samplr")
