"""Every word survives the journal, and is written there as documented."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import ValidationError

from spotlight_core import events
from spotlight_core.events import Command, Event, Finished, NodeJoined, SPGroup, Start, decode, encode
from spotlight_core.types import Fidelity, GenerationRequest, PolicyVersion, Prompt

WORDS: list[type] = [*events.EVENTS, *events.COMMANDS]


def with_one_prompt(request: Any) -> Any:
    """A request needs a seed, and one prompt for all of its seeds or one for each."""
    return st.builds(
        GenerationRequest,
        **{**request, "prompts": st.tuples(values(Prompt)), "seeds": st.tuples(st.integers(), st.integers())},
    )


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation, all fields of nested dataclasses included."""
    if hint is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, msgspec.Struct)):
        hints = get_type_hints(hint)
        fields = dataclasses.fields(hint) if dataclasses.is_dataclass(hint) else msgspec.structs.fields(hint)
        names = [field.name for field in fields]
        parts = {name: values(hints[name]) for name in names}
        return with_one_prompt(parts) if hint is GenerationRequest else st.builds(hint, **parts)
    if get_origin(hint) is tuple:
        return st.lists(values(get_args(hint)[0]), max_size=2).map(tuple)
    if get_origin(hint) is Mapping:
        return st.dictionaries(st.text(max_size=3), st.integers() | st.lists(st.text(max_size=3)), max_size=2)
    if hint is str:
        return st.text(max_size=6)
    return st.from_type(hint)


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word.__name__)
def test_word_round_trips_through_json(word: type) -> None:
    @settings(max_examples=25)
    @given(values(word))
    def round_trip(original: Any) -> None:
        line = encode(original)
        assert json.loads(line)["word"] == word.__name__
        restored = decode(line)
        assert type(restored) is word
        assert restored == original

    round_trip()


def test_the_vocabulary_is_complete() -> None:
    defined = {
        name
        for name, value in vars(events).items()
        if isinstance(value, type) and issubclass(value, Event | Command)
    }
    assert {word.__name__ for word in WORDS} == defined - {"Event", "Command"}


def test_start_is_written_as_documented() -> None:
    start = Start(
        group=SPGroup(node="spot-0", incarnation=2),
        lease="7",
        request=GenerationRequest(
            id="r",
            kind="explore",
            prompts=(Prompt(occurrence="1/0", text='A bib with "12"'),),
            seeds=(3, 4),
            policy=PolicyVersion(label="old", number=1, digest="d"),
            fidelity=Fidelity(denoise_steps=10, reused_steps=(7, 9)),
        ),
        from_denoise_step=4,
        state_ref="tensor_store/r-4",
    )
    assert json.loads(encode(start)) == {
        "word": "Start",
        "group": {"node": "spot-0", "incarnation": 2, "ranks": [0], "generation": 0},
        "lease": "7",
        "request": {
            "id": "r",
            "kind": "explore",
            "prompts": [{"text": 'A bib with "12"', "metadata": {}, "occurrence": "1/0"}],
            "seeds": [3, 4],
            "policy": {"label": "old", "number": 1, "digest": "d"},
            "fidelity": {"denoise_steps": 10, "reused_steps": [7, 9], "sde_steps": None},
        },
        "from_denoise_step": 4,
        "state_ref": "tensor_store/r-4",
        "state_digest": None,
        "queued": False,
    }


def test_stamping_sets_time_order_and_epoch_and_nothing_else() -> None:
    event = NodeJoined(node="spot-1", incarnation=2, pool="spot", gpus=1, started_at=3.5)
    stamped = event.stamped(10.25, 7, 2)
    assert (stamped.at, stamped.seq, stamped.epoch) == (10.25, 7, 2)
    assert msgspec.structs.replace(stamped, at=0.0, seq=0, epoch=0) == event
    assert event.seq == 0


def test_a_record_with_a_wrong_or_missing_field_is_refused() -> None:
    record = json.loads(encode(Finished(lease="1", request="r", ref="x", digest="d")))
    with pytest.raises(ValidationError, match="seq"):
        decode(json.dumps({**record, "seq": "soon"}))
    with pytest.raises(ValidationError, match="digest"):
        decode(json.dumps({key: value for key, value in record.items() if key != "digest"}))
    with pytest.raises(ValidationError, match="Vanished"):
        decode(json.dumps({**record, "word": "Vanished"}))
