"""The cost model is read off a run's records."""

import pytest

from spotlight_core.costs.recorded import fit_line, from_records


def test_a_line_through_the_medians_of_two_row_counts() -> None:
    fixed, per_row = fit_line([(8, 0.010), (8, 0.012), (8, 0.011), (16, 0.019)])
    assert per_row == pytest.approx(0.001)
    assert fixed == pytest.approx(0.003)


def test_one_row_count_is_taken_per_row_and_none_is_refused() -> None:
    assert fit_line([(8, 0.016)]) == (0.0, 0.002)
    with pytest.raises(ValueError, match="no measured"):
        fit_line([])


Record = dict[str, object]
GROUP: Record = {"node": "n", "incarnation": 1, "ranks": [0]}


def start(at: float, lease: str, rows: int, from_step: int = 0, queued: bool = False) -> list[Record]:
    request = {"seeds": list(range(rows)), "fidelity": {"denoise_steps": 10, "reused_steps": [7, 9]}}
    work = {"lease": lease, "request": request, "from_denoise_step": from_step, "group": GROUP}
    return [{"word": "Submitted", "at": at}, {"word": "Start", "queued": queued, **work}]


def said(word: str, at: float, lease: str) -> Record:
    return {"word": word, "at": at, "lease": lease}


ITERATIONS = [{"metrics": {"seconds/train": s, "seconds/score_per_image": 0.01}} for s in (1, 5, 2)]


def test_costs_of_a_recorded_run() -> None:
    journal = [
        *start(1.0, "a", 8),
        said("Finished", 1.08, "a"),
        *start(2.0, "b", 16),
        said("Finished", 2.16, "b"),
        *start(3.0, "resumed", 16, from_step=5),
        said("Finished", 9.0, "resumed"),
        {"word": "Load", "group": GROUP},
        {"word": "WeightsLoaded", "at": 9.5, "group": GROUP},
    ]
    costs = from_records(journal, ITERATIONS, boot_seconds=7.0)
    assert costs.denoise_step_seconds(8) == pytest.approx(0.01)
    assert costs.denoise_step_seconds(16) == pytest.approx(0.02)
    assert (costs.load_seconds, costs.train_seconds, costs.score_seconds_per_image) == (0.5, 2, 0.01)
    assert (costs.boot_seconds, costs.launch_seconds) == (7.0, 0.0)


def test_loads_of_two_groups_of_a_node_are_told_apart() -> None:
    other = {**GROUP, "ranks": [1]}
    journal = [
        *start(1.0, "a", 8),
        said("Finished", 1.08, "a"),
        {"word": "Load", "group": GROUP},
        {"word": "Timer", "at": 2.0},
        {"word": "Load", "group": other},
        {"word": "WeightsLoaded", "at": 4.0, "group": other},
        {"word": "WeightsLoaded", "at": 5.08, "group": GROUP},
    ]
    assert from_records(journal, ITERATIONS, boot_seconds=0.0).load_seconds == pytest.approx(3.0)


def test_a_queued_request_is_timed_from_its_beginning_and_not_from_its_place_in_line() -> None:
    journal = [
        *start(1.0, "a", 8),
        said("Started", 1.5, "a"),
        *start(1.6, "b", 8, queued=True),
        said("Started", 1.7, "a"),  # a sign of life
        said("Finished", 2.3, "a"),
        *start(2.4, "c", 8, queued=True),
        said("Finished", 3.1, "b"),  # never said that it began: it followed at once
        said("Started", 3.2, "c"),
        said("Finished", 4.0, "c"),
    ]
    costs = from_records(journal, ITERATIONS, boot_seconds=0.0)
    assert costs.denoise_step_seconds(8) == pytest.approx(0.1)
    assert costs.launch_seconds == pytest.approx(0.5)
