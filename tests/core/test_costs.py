"""The cost model is read off a run's records."""

import pytest

from spotlight_core.costs import fit_line, from_records


def test_a_line_through_the_medians_of_two_row_counts() -> None:
    fixed, per_row = fit_line([(8, 0.010), (8, 0.012), (8, 0.011), (16, 0.019)])
    assert per_row == pytest.approx(0.001)
    assert fixed == pytest.approx(0.003)


def test_one_row_count_is_taken_per_row_and_none_is_refused() -> None:
    assert fit_line([(8, 0.016)]) == (0.0, 0.002)
    with pytest.raises(ValueError, match="no measured"):
        fit_line([])


def test_costs_of_a_recorded_run() -> None:
    def start(at: float, lease: str, rows: int, from_step: int = 0) -> list[dict[str, object]]:
        request = {"seeds": list(range(rows)), "fidelity": {"denoise_steps": 10, "reused_steps": [7, 9]}}
        return [
            {"word": "Submitted", "at": at},
            {"word": "Start", "lease": lease, "request": request, "from_denoise_step": from_step},
        ]

    journal = [
        *start(1.0, "a", 8),
        {"word": "Finished", "at": 1.08, "lease": "a"},
        *start(2.0, "b", 16),
        {"word": "Finished", "at": 2.16, "lease": "b"},
        *start(3.0, "resumed", 16, from_step=5),
        {"word": "Finished", "at": 9.0, "lease": "resumed"},
        {"word": "Load", "node": "n", "incarnation": 1},
        {"word": "WeightsLoaded", "at": 9.5, "node": "n", "incarnation": 1},
    ]
    iterations = [{"metrics": {"seconds/train": s, "seconds/score_per_image": 0.01}} for s in (1, 5, 2)]
    costs = from_records(journal, iterations, boot_seconds=7.0)
    assert costs.denoise_step_seconds(8) == pytest.approx(0.01)
    assert costs.denoise_step_seconds(16) == pytest.approx(0.02)
    assert (costs.load_seconds, costs.train_seconds, costs.score_seconds_per_image) == (0.5, 2, 0.01)
    assert costs.boot_seconds == 7.0
