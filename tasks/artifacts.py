"""What people look at on the Prefect pages and in the run folder: image grids, tables, progress, links."""

import base64
import io
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from uuid import UUID

from PIL import Image, ImageDraw, ImageFont
from prefect.artifacts import (
    acreate_image_artifact,
    acreate_markdown_artifact,
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)

from spotlight_core.types import Evaluation, IterationReport
from tasks.gallery import Gallery

_MARGIN, _CAPTION = 6, 26
_INK, _GOOD, _BAD = (
    (40, 40, 40),
    (0, 114, 178),
    (213, 94, 0),
)  # blue and vermilion: safe for colour-blind eyes
_PAPER = (255, 255, 255)


def draw_grid(gallery: Gallery, *, columns: int, count: int, width: int) -> Image.Image:
    """The first ``count`` images, ``width`` pixels wide, each above its quoted target and its score."""
    images = gallery.images[:count]
    enlarged = width >= images.shape[2]
    if enlarged:
        width -= width % images.shape[2]  # whole pixels of a small image stay squares
    height = max(round(images.shape[1] * width / images.shape[2]), 1)
    resampling = Image.Resampling.NEAREST if enlarged else Image.Resampling.LANCZOS
    rows = -(-len(images) // columns)
    sheet = Image.new(
        "RGB",
        (columns * (width + _MARGIN) + _MARGIN, rows * (height + _CAPTION + _MARGIN) + _MARGIN),
        _PAPER,
    )
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=12)
    for index, pixels in enumerate(images):
        x = _MARGIN + index % columns * (width + _MARGIN)
        y = _MARGIN + index // columns * (height + _CAPTION + _MARGIN)
        tile = Image.fromarray(pixels).resize((width, height), resampling)
        sheet.paste(tile, (x, y))
        pen.rectangle((x - 1, y - 1, x + width, y + height), outline=(200, 200, 200))
        score = gallery.scores[index]
        pen.text((x, y + height + 3), _caption(gallery.prompts[index]), fill=_INK, font=font)
        mark = f"{score:.2f}"
        right = x + width - pen.textlength(mark, font=font)
        pen.text((right, y + height + 3), mark, fill=_GOOD if score >= 1 else _BAD, font=font)
    return sheet


def save_grid(gallery: Gallery, path: Path) -> None:
    """The grid of the report: 16 held-out images."""
    draw_grid(gallery, columns=4, count=16, width=_wide(gallery, 128, 256)).save(path, optimize=True)


def data_uri(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.convert("P", palette=Image.Palette.ADAPTIVE).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


async def iteration_artifacts(run: str, report: IterationReport, metrics: Mapping[str, float]) -> None:
    """The iteration's numbers as a table, one row each, under the keys that MLflow has."""
    rows = [{"metric": name, "value": _rounded(value)} for name, value in sorted(metrics.items())]
    await acreate_table_artifact(
        rows,
        key=artifact_key(run, "iteration"),
        description=f"Iteration {report.iteration}: policy {report.state.policy.name}",
    )


async def image_artifact(run: str, gallery: Gallery, description: str) -> None:
    """A small grid inside the artifact itself: the page shows it without a file server."""
    await acreate_image_artifact(
        data_uri(draw_grid(gallery, columns=8, count=32, width=_wide(gallery, 64, 112))),
        key=artifact_key(run, "images"),
        description=description,
    )


class ProgressArtifact:
    """One progress bar for the whole run, on the page of the ``post-train`` flow run."""

    def __init__(self, artifact_id: UUID, iterations: int) -> None:
        self._id = artifact_id
        self._iterations = iterations

    @classmethod
    async def begin(cls, run: str, done: int, iterations: int) -> "ProgressArtifact":
        artifact_id = await acreate_progress_artifact(
            100.0 * done / iterations,
            key=artifact_key(run, "progress"),
            description=f"{run}: {iterations} iterations",
        )
        return cls(artifact_id, iterations)

    async def advance(self, done: int, evaluation: Evaluation | None) -> None:
        said = f", score {evaluation.score:.3f}" if evaluation else ""
        await aupdate_progress_artifact(
            self._id,
            100.0 * done / self._iterations,
            description=f"iteration {done} of {self._iterations}{said}",
        )


async def tracking_artifact(run: str, mlflow_run_id: str, command: str, report: Path) -> None:
    """Where the run's MLflow page and report are."""
    markdown = f"""
        ### {run} elsewhere
        - MLflow run `{mlflow_run_id}`; serve its store with
          `{command}`
        - Report: `{report}`
    """
    await acreate_markdown_artifact(
        textwrap.dedent(markdown), key=artifact_key(run, "tracking"), description="MLflow run and report"
    )


def artifact_key(run: str, what: str) -> str:
    """Prefect's keys allow lower-case letters, digits and dashes only."""
    return re.sub(r"[^a-z0-9]+", "-", f"{run}-{what}".lower()).strip("-")


def _wide(gallery: Gallery, small: int, large: int) -> int:
    """How wide to draw: photographs need more room than the embedded model's digits."""
    return large if gallery.images.shape[2] >= large else small


def _caption(prompt: str) -> str:
    quoted = re.search(r'"([^"]*)"', prompt)
    return quoted.group(1) if quoted else prompt[:12]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
