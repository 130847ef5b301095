"""The probe: a short prompt whose answer shows whether an engine serves the learner's weights.

The prompt of an image-text model shows a picture, so that its vision tower has a part in the
answer.
"""

from __future__ import annotations

import numpy as np

from rllib_gigpo.config import GiGPOConfig
from rllib_gigpo.encoding import Encoded, encode_chat
from rllib_gigpo.engines.base import Completion, Request, Sampling
from rllib_gigpo.models import load_tokenizer, materialize
from rllib_gigpo.vision import Gallery, Picture
from rllib_gigpo.vision.sight import load_sight

_TOKENS = 32
_CHARACTERS = 400
_TEXT = (
    "A small boat left the harbour early in the morning. The fisherman and his daughter wanted to "
    "reach the island before noon, because the wind was going to turn. They carried bread, water "
    "and two lamps. Please tell me in a few sentences what happened to them on the way."
)
_SIDE = 64
# Mean difference per token. fp32 implementations differ by 1e-5. In bf16 SmolLM2 differs by 0.02 to
# 0.06 with the right weights, on both engines; by 0.41 and more where the MLP of one layer is lost,
# 0.24 and more where the engine is eight supervised steps of 1e-4 behind.
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.12}


def probe_prompt(config: GiGPOConfig) -> Encoded:
    """Return the prompt: what the model knows, so that rounding matters little.

    It is a message in the model's own chat template, made of a short English text, or for the tiny
    models of their environment's words; cut to `max_prompt_tokens`. For an image-text model a
    picture stands before the text. Where no picture of 64 x 64 pixels fits the limit, the run can
    show none either, and the probe is text alone.
    """
    spec = config.model_spec
    path, limit = materialize(spec), config.max_prompt_tokens
    tokenizer, sight = load_tokenizer(path), load_sight(path)
    text = " ".join(spec.words)[:_CHARACTERS] or _TEXT
    if sight is not None:
        picture = _picture()
        for words in (text.split()[:kept] for kept in (None, 16, 4, 0)):
            message = {"role": "user", "content": " ".join((picture.mark, *words))}
            found = encode_chat(tokenizer, [message], {picture.name: picture}, sight)
            if len(found.ids) <= limit:
                return found
    messages = [{"role": "user", "content": text}]
    return Encoded(encode_chat(tokenizer, messages, sight=sight).ids[-limit:])


def _picture() -> Picture:
    """A red square on a ground whose green and blue rise to the right and downwards."""
    ramp = np.arange(_SIDE, dtype=np.uint8) * (256 // _SIDE)
    pixels = np.zeros((_SIDE, _SIDE, 3), dtype=np.uint8)
    pixels[..., 1], pixels[..., 2] = ramp, ramp[:, None]
    pixels[_SIDE // 4 : _SIDE // 2, _SIDE // 4 : _SIDE // 2] = (255, 0, 0)
    return Gallery().hang(pixels)


def probe_request(config: GiGPOConfig, module_id: str, prompt: Encoded, group: int) -> Request:
    """Return the probe for the engine that serves a group."""
    return Request(
        prompt_ids=prompt.ids,
        sampling=Sampling(
            temperature=config.temperature,
            max_tokens=min(_TOKENS, config.max_response_tokens),
        ),
        seed=505,
        request_id=f"probe:{module_id}:{group}",
        policy_id=module_id,
        group_id=group,
        images=prompt.images,
    )


def check_probe(
    completion: Completion, learner_logps: np.ndarray, version: int, tolerance: float
) -> None:
    """Compare an engine's log-probabilities with the learner's.

    Raises:
        RuntimeError: They differ by more than the tolerance per token, the version is another, or
            the learner's own are not finite.
    """
    if completion.weight_version != version:
        raise RuntimeError(
            f"after the sync an engine serves weight version {completion.weight_version}, expected "
            f"{version}"
        )
    if not np.isfinite(learner_logps).all():
        raise RuntimeError(
            f"at version {version} the learner's log-probabilities are not finite: its weights "
            "hold NaN or too large values; restore an earlier checkpoint and lower lr"
        )
    gap = float(np.mean(np.abs(completion.logps - learner_logps)))
    if not gap <= tolerance:
        raise RuntimeError(
            f"after the sync to version {version} an engine's log-probabilities differ from the "
            f"learner's by {gap:.4g} per token (allowed: {tolerance:g}): it does not serve the "
            "learner's weights; if the difference is the engine's arithmetic, raise "
            "engines(probe_tolerance=...)"
        )
