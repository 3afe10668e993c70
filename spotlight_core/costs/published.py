"""Published costs, as named cost models: what planners go by before anything was measured here."""

from spotlight_core.costs.model import CostModel, StepCost
from spotlight_core.errors import BadInputError

_PATCH_PIXELS = 16  # a token of Qwen-Image is a 2 x 2 patch of latent pixels, each of 8 x 8 pixels
# Milliseconds of one denoise step of one image on H20 GPUs at SP 1, 2 and 4, by the image's side.
_QWEN_IMAGE_H20 = {512: (155, 161, 172), 1024: (605, 350, 207), 1536: (1557, 880, 464)}


def _qwen_image_h20() -> CostModel:
    """Qwen-Image on H20: Spotlight's figures of denoise steps; launch 117 s and broadcast 15 s of an engine.

    The rows of a batch are taken to cost alike, since the figures are of one image.
    """
    steps = [
        StepCost(
            tokens=(side // _PATCH_PIXELS) ** 2,
            degree=degree,
            fixed_seconds=0.0,
            per_row_seconds=milliseconds / 1000,
        )
        for side, row in _QWEN_IMAGE_H20.items()
        for degree, milliseconds in zip((1, 2, 4), row, strict=True)
    ]
    own, *others = steps
    return CostModel(
        denoise_step_fixed_seconds=own.fixed_seconds,
        denoise_step_per_row_seconds=own.per_row_seconds,
        tokens=own.tokens,
        sharded=tuple(others),
        launch_seconds=0.0,
        load_seconds=15.0,
        score_seconds_per_image=0.0,
        train_seconds=0.0,
        boot_seconds=117.0,
        standby_seconds=45.0,
    )


_PUBLISHED = {"qwen_image_h20": _qwen_image_h20}
NAMES = tuple(_PUBLISHED)


def published(name: str) -> CostModel:
    """A published cost model.

    Raises:
        BadInputError: there is none of this name.
    """
    if name not in _PUBLISHED:
        raise BadInputError(f"no published costs {name!r}", f"the names are {', '.join(NAMES)}")
    return _PUBLISHED[name]()
