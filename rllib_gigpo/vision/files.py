"""Pictures as text, for files of examples."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image

from rllib_gigpo.vision.pictures import Gallery, Picture


def png_of_picture(picture: Picture) -> str:
    """Return a picture as a PNG file in base64."""
    file = io.BytesIO()
    Image.fromarray(picture.pixels).save(file, format="PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def picture_of_png(text: str) -> Picture:
    """Return what `png_of_picture` wrote."""
    image = Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB")
    return Gallery().hang(np.asarray(image))
