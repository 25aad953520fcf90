"""Images as samples, through Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dovetail.errors import MissingExtraError
from dovetail.graph.types import Array, TensorType
from dovetail.npy import MOST_BYTES, InputError

MOST_PIXELS = 1 << 26
"""Pixels an image may have."""
_MODES = {1: "L", 3: "RGB"}


def read_images(files: Sequence[Path], kind: TensorType, resize: bool) -> Array:
    """Image files as uint8 [N, *shape], elements 0 to 255.

    Args:
        files: PNG or JPEG files.
        kind: the model's input: [1, H, W, C] or [1, C, H, W] of 1 or 3 channels.
        resize: scale images of another size (bilinear); without, they are refused.

    Raises:
        InputError: damaged, too large, of another size, or the input is no image.
        MissingExtraError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtraError("PIL", "images", "reading images") from None
    height, width, channels, first = image_axes(kind)
    if len(files) * kind.elements > MOST_BYTES:
        raise InputError(f"{len(files) * kind.elements} bytes of images, the limit is {MOST_BYTES}",
                         where=str(files[0].parent) if files else "images",
                         hint="use fewer images: --samples limits their number")
    found = []
    for file in files:
        try:
            with Image.open(file, formats=("PNG", "JPEG")) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise InputError(f"{image.width}x{image.height} pixels, the limit is {MOST_PIXELS}",
                                     where=str(file), hint="scale the image down")
                if image.size != (width, height) and not resize:
                    what = f"{image.width}x{image.height} pixels, the model takes {width}x{height}"
                    raise InputError(what, where=str(file), hint="scale the images, or give --resize")
                whole = image.convert(_MODES[channels])
                if whole.size != (width, height):
                    whole = whole.resize((width, height), Image.Resampling.BILINEAR)
                pixels = np.asarray(whole, np.uint8).reshape(height, width, channels)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise InputError(f"not a PNG or JPEG image: {error}", where=str(file),
                             hint="save it again as PNG or JPEG, or take it out of the folder") from None
        found.append(pixels.transpose(2, 0, 1) if first else pixels)
    return np.stack(found)[:, None]


def image_axes(kind: TensorType) -> tuple[int, int, int, bool]:
    """Height, width and channels of an image input, and whether channels come first; raises InputError for others."""
    shape = kind.shape
    if len(shape) == 4 and shape[0] == 1 and shape[3] in _MODES:
        return shape[1], shape[2], shape[3], False
    if len(shape) == 4 and shape[0] == 1 and shape[1] in _MODES:
        return shape[2], shape[3], shape[1], True
    raise InputError(f"the model's input is {kind}, not one image of 1 or 3 channels", where="model",
                     hint="give the samples as arrays in an .npz")
