"""Scorer processes: real children, killed, failing and recovering."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from spotlight_core.config import (
    FunctionRewardConfig,
    JpegSizeRewardConfig,
    OcrRewardConfig,
    RewardPart,
    TemplateRewardConfig,
    WeightedRewardConfig,
)
from spotlight_core.errors import BadInputError, ScorerError
from spotlight_core.rewards import patience
from spotlight_core.rewards import scorer as scorer_module
from spotlight_core.rewards.scorer import ScorerPool
from spotlight_core.rewards.selftest import GOLDEN, golden_images
from spotlight_core.types import PromptRow
from tests.core.rewards.prompts import rows

PROMPTS = [PromptRow(text=f'A "{text}"') for text in GOLDEN]
PIXELS = np.full((2, 4, 4, 3), 51, np.uint8)


@pytest.fixture(scope="module")
def pool() -> Iterator[ScorerPool]:
    pool = ScorerPool(OcrRewardConfig(), TemplateRewardConfig(type="template"))
    pool.check()
    yield pool
    pool.close()


def _function(tmp_path: Path, body: str) -> FunctionRewardConfig:
    file = tmp_path / "mine.py"
    file.write_text(
        f"import os\nfrom pathlib import Path\nseen = Path({str(tmp_path / 'calls')!r})\n\n{body}"
    )
    return FunctionRewardConfig(type="function", file=file)


def test_both_rewards_answer(pool: ScorerPool) -> None:
    futures = [pool.submit(golden_images(), PROMPTS), pool.submit_held_out(golden_images(), PROMPTS)]
    assert [future.result(60).scores for future in futures] == [(1.0,) * 4, (1.0,) * 4]


def test_a_killed_scorer_is_restarted_and_the_score_is_the_same(pool: ScorerPool) -> None:
    (pid,) = pool.pids
    os.kill(pid, signal.SIGKILL)
    assert pool.submit(golden_images(), PROMPTS).result(60).scores == (1.0,) * 4
    assert pool.pids != [pid]


def test_the_scorer_ignores_a_terminals_interrupt(pool: ScorerPool) -> None:
    (pid,) = pool.pids
    os.kill(pid, signal.SIGINT)
    assert os.getpgid(pid) != os.getpgid(0)
    assert pool.submit(golden_images(), PROMPTS).result(60).scores == (1.0,) * 4
    assert pool.pids == [pid]


def test_batches_are_checked_before_they_are_sent(pool: ScorerPool) -> None:
    with pytest.raises(ValueError, match="one uint8 image"):
        pool.submit(golden_images(), PROMPTS[:2])
    with pytest.raises(ValueError, match="one uint8 image"):
        pool.submit(golden_images().astype(np.float32), PROMPTS)
    with pytest.raises(ValueError, match="one uint8 image"):
        pool.submit(golden_images()[0], PROMPTS)


def test_a_reward_that_recovers_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer_module, "BACKOFF_SECONDS", (0.01, 0.02))
    body = (
        "def score(image, prompt):\n"
        "    print('a reward may print')\n"
        "    if prompt == 'once' and not seen.exists():\n"
        "        seen.write_text('x')\n"
        "        raise OSError('engine is away')\n"
        "    return 0.25\n"
    )
    pool = ScorerPool(_function(tmp_path, body), None)
    try:
        assert pool.submit(PIXELS, rows("once", "once")).result(60).scores == (0.25, 0.25)
        with pytest.raises(ValueError, match="without a held-out reward"):
            pool.submit_held_out(PIXELS, rows("a", "b"))
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        ("raise OSError('engine is away')", r"OSError: engine is away at mine\.py:7"),
        ("{}['length']", r"KeyError: 'length' at mine\.py:7"),
        ("os._exit(3)", "ended with exit code 3"),
    ],
)
def test_a_failing_reward_ends_in_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str, said: str
) -> None:
    monkeypatch.setattr(scorer_module, "BACKOFF_SECONDS", (0.01, 0.02))
    body = f"def score(image, prompt):\n    if prompt == 'bad':\n        {failure}\n    return 0.5\n"
    pool = ScorerPool(_function(tmp_path, body), None)
    try:
        with pytest.raises(ScorerError, match=rf"scorer 'function' failed 4 times \(.*{said}"):
            pool.submit(PIXELS, rows("good", "bad")).result(120)
        assert pool.submit(PIXELS, rows("good", "good")).result(60).scores == (0.5, 0.5)
    finally:
        pool.close()


def test_a_hung_scorer_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer_module, "BACKOFF_SECONDS", (0.01, 0.02))
    body = (
        "def score(image, prompt):\n"
        "    if prompt == 'hang' and not seen.exists():\n"
        "        seen.write_text('x')\n"
        "        import time; time.sleep(3600)\n"
        "    return 0.75\n"
    )
    pool = ScorerPool(_function(tmp_path, body), None)
    try:
        pool.check()
        monkeypatch.setattr(patience, "REQUEST_SECONDS", 2.0)
        assert pool.submit(PIXELS, rows("hang", "hang")).result(60).scores == (0.75, 0.75)
        (tmp_path / "calls").unlink()
        monkeypatch.setattr(scorer_module, "ATTEMPTS", 1)
        with pytest.raises(ScorerError, match=r"failed 1 time \(no answer in 2 seconds\)"):
            pool.submit(PIXELS, rows("hang", "hang")).result(60)
    finally:
        pool.close()


def test_a_prompt_at_fault_is_not_tried_again(pool: ScorerPool) -> None:
    with pytest.raises(ScorerError, match=r"'ocr' failed 1 time \(BadInputError: no quoted target"):
        pool.submit(golden_images()[:1], rows("no quotes")).result(60)


def test_metadata_parts_and_videos_cross_the_process(tmp_path: Path) -> None:
    body = "def score(image, prompt):\n    return float(image.mean()) / 255\n"
    parts = (
        RewardPart(weight=2.0, reward=_function(tmp_path, body)),
        RewardPart(weight=0.0, reward=JpegSizeRewardConfig(type="jpeg_size")),
    )
    pool = ScorerPool(WeightedRewardConfig(type="weighted", parts=parts), None)
    rows = [PromptRow(text="a", metadata={"include": [{"class": "dog", "count": 1}]}), PromptRow(text="中")]
    try:
        images = pool.submit(PIXELS, rows).result(60)
        assert images.scores == (0.4, 0.4)
        assert set(images.parts) == {"function", "jpeg_size"}
        assert images.parts["function"] == (0.2, 0.2)
        videos = np.stack([PIXELS, 2 * PIXELS, 4 * PIXELS], axis=1)
        assert videos.shape == (2, 3, 4, 4, 3)
        assert pool.submit(videos, rows).result(60).scores == pytest.approx((2 * 1.4 / 3,) * 2)
    finally:
        pool.close()


def test_check_reports_a_failed_self_test_and_a_bad_file(tmp_path: Path) -> None:
    nonsense = ScorerPool(_function(tmp_path, "def score(image, prompt):\n    return 7\n"), None)
    missing = ScorerPool(FunctionRewardConfig(type="function", file=tmp_path / "none.py"), None)
    try:
        with pytest.raises(ScorerError, match=r"mine\.py:score answered 7"):
            nonsense.check()
        with pytest.raises(BadInputError, match="no reward file"):
            missing.check()
    finally:
        nonsense.close()
        missing.close()


def test_close_ends_the_processes_and_refuses_more() -> None:
    pool = ScorerPool(JpegSizeRewardConfig(type="jpeg_size"), None, processes=2)
    pool.check()
    children = [psutil.Process(pid) for pid in pool.pids]
    assert len(children) == 2
    pool.close()
    pool.close()
    assert not any(child.is_running() for child in children)
    assert pool.pids == []
    with pytest.raises(ScorerError, match="closed"):
        pool.submit(PIXELS, rows("a", "b"))


def test_the_scorer_dies_with_its_parent() -> None:
    """A driver that is killed cannot clean up: its scorer must notice by itself."""
    import subprocess
    import sys

    program = (
        "import os, time\n"
        "from spotlight_core.config import JpegSizeRewardConfig\n"
        "from spotlight_core.rewards.scorer import ScorerPool\n"
        "pool = ScorerPool(JpegSizeRewardConfig(type='jpeg_size'), None)\n"
        "pool.check()\n"
        "print(pool.pids[0], flush=True)\n"
        "time.sleep(3600)\n"
    )
    root = Path(scorer_module.__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=root
    ) as driver:
        assert driver.stdout is not None
        child = psutil.Process(int(driver.stdout.readline()))
        driver.kill()
    deadline = time.monotonic() + 15
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
