"""What a transformers engine remembers of pictures, and when it forgets them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from rllib_gigpo.engines.base import Request, Sampling
from rllib_gigpo.engines.view import View
from rllib_gigpo.vision.pictures import Gallery, PlacedPicture


class FourFeatures:
    """A model's image side with four features per picture."""

    def num_features(self, picture) -> int:
        return 4

    def positions(self, length, images):
        return None


def view_of() -> View:
    sight: Any = FourFeatures()
    model: Any = SimpleNamespace(base_model=None)
    return View(sight, model)


def addresses(view: View, shade: int) -> list[int]:
    """The prompt "5 <four tokens of a picture> 6" as it is addressed."""
    picture = Gallery().hang(np.full((2, 2, 3), shade, dtype=np.uint8))
    request = Request(
        request_id=str(shade),
        prompt_ids=np.array([5, 9, 9, 9, 9, 6], dtype=np.int32),
        sampling=Sampling(max_tokens=1),
        seed=0,
        images=(PlacedPicture(picture, ((1, 4),)),),
    )
    return view.look(request).addressed.tolist()


def test_every_distinct_picture_has_addresses_of_its_own():
    view = view_of()
    # -1 marks an empty cell, so the first feature stands at -1 - 1.
    assert addresses(view, 0) == [5, -2, -3, -4, -5, 6]
    assert addresses(view, 1) == [5, -6, -7, -8, -9, 6]
    assert addresses(view, 0) == [5, -2, -3, -4, -5, 6]


def test_with_new_weights_addresses_are_given_anew():
    view = view_of()
    for shade in range(100):
        addresses(view, shade)
    view.forget()
    assert addresses(view, 7) == [5, -2, -3, -4, -5, 6]
