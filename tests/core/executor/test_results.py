"""Results by lease: what a request is settled with is there until it is taken, and nothing else stays."""

import numpy as np
import pytest

from spotlight_core.arrays import arrays_digest, to_bytes
from spotlight_core.executor.results import Results

ZEROS = {"x": np.zeros(1)}
ONES = {"x": np.ones(1)}


def finish(results: Results, request: str, ref: str, payload: bytes) -> None:
    results.put(request, ref, payload)
    results.end(request, ref)


def test_a_request_submitted_again_gets_the_result_of_its_new_life() -> None:
    results = Results()
    results.begin("r", "1.1")
    results.settle("r", None)  # cancelled while it is computed
    results.begin("r", "1.2")
    finish(results, "r", "1.1", to_bytes(ZEROS))
    finish(results, "r", "1.2", to_bytes(ONES))
    results.settle("r", "1.2")
    assert arrays_digest(results.take("1.2")) == arrays_digest(ONES)
    with pytest.raises(KeyError):
        results.take("1.1")
    assert results.bytes_held() == 0


def test_the_lease_that_a_request_is_settled_with_is_kept_and_its_twin_is_not() -> None:
    results = Results()
    for ref, arrays in (("1.1", ZEROS), ("1.2", ONES)):
        results.begin("r", ref)
        finish(results, "r", ref, to_bytes(arrays))
    results.begin("r", "1.3")
    results.settle("r", "1.2")
    finish(results, "r", "1.3", to_bytes(ZEROS))  # too late
    assert results.bytes_held() == len(to_bytes(ONES))
    assert results.payload("1.2") == results.payload("1.2") == to_bytes(ONES)
    results.discard("1.2")
    assert results.bytes_held() == 0


def test_a_result_of_a_cancelled_request_is_dropped() -> None:
    results = Results()
    results.begin("r", "1.1")
    finish(results, "r", "1.1", to_bytes(ZEROS))
    results.settle("r", None)
    assert results.bytes_held() == 0


def test_nothing_is_remembered_of_what_is_over() -> None:
    results = Results()
    for number in range(3):
        results.begin("failed", f"1.{number}")
        results.end("failed", f"1.{number}")
    results.begin("done", "1.9")
    finish(results, "done", "1.9", to_bytes(ZEROS))
    results.settle("done", "1.9")
    results.take("1.9")
    assert results._open == results._payloads == {}
