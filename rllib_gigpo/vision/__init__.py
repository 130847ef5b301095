"""Vision-language agents: pictures in prompts, and models that see them.

    observation -> Gallery -> text with marks, Picture
    text with marks -> PromptEncoder, Sight -> token ids, PlacedPicture
    token ids, PlacedPicture -> Sight.inputs -> what a language model reads

Text models need none of this, and no part of it needs torchvision.
"""

from rllib_gigpo.vision.pictures import Gallery, Picture, PlacedPicture, split_marks

__all__ = ["Gallery", "Picture", "PlacedPicture", "split_marks"]
