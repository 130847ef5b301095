"""What a checkpoint tells whoever plays its policy: environment, agent, limits; and its model.

RLlib checkpoints are Python pickles, and unpickling one runs whatever code its author put into it.
They are read by `rllib_gigpo.safe_pickle` instead, which runs none; what cannot be read so, such as
an agent profile of a class of one's own, needs `trust=True`.
"""

from __future__ import annotations

import logging
import pickle
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rllib_gigpo import safe_pickle
from rllib_gigpo.agent.profile import AgentProfile

_SETTINGS = "class_and_ctor_args.pkl"
# What is taken from the settings, and so may hold nothing unknown.
_NEEDED = (
    "env",
    "env_config",
    "eval_temperature",
    "evaluation_config",
    "max_episode_steps",
    "max_prompt_tokens",
    "max_response_tokens",
    "profile",
)
_NUMBERED = re.compile(r"checkpoint_(\d+)")


@dataclass(frozen=True)
class TrainedAs:
    """The settings of a run that its policy is played with.

    Attributes:
        env: Name of the environment.
        env_config: Its settings in evaluation.
        profile: The agent; None is the environment's own.
        max_prompt_tokens: Limit of a prompt.
        max_response_tokens: Limit of a response.
        eval_temperature: Of evaluation.
        max_episode_steps: Steps after which an episode is cut off, besides the environment's limit.
        has_adapter: Whether a LoRA adapter was trained.
    """

    env: str
    env_config: Mapping[str, Any]
    profile: AgentProfile | None
    max_prompt_tokens: int
    max_response_tokens: int
    eval_temperature: float
    max_episode_steps: int | None
    has_adapter: bool


def find_checkpoint(path: str | Path) -> Path | None:
    """Return the checkpoint that a path names: itself, or the newest one in the folder of a run.

    Args:
        path: A checkpoint, or a folder with `checkpoint` or Tune's `checkpoint_000003` in it, or
            the results of a Tuner or of a tuned example in which one trial has trained.
    """
    folder = Path(path).expanduser()
    candidates = [folder, folder / "checkpoint", *_numbered(folder)]
    for trials in (folder.glob("trials/*"), folder.glob("*")):
        trained = [numbered for below in trials if (numbered := _numbered(below))]
        candidates += trained[0] if len(trained) == 1 else []
    return next((place for place in candidates if (place / _SETTINGS).is_file()), None)


def _numbered(folder: Path) -> list[Path]:
    """Return Tune's checkpoints of a trial, the newest first."""
    found = [
        (int(name.group(1)), below)
        for below in folder.glob("checkpoint_*")
        if (name := _NUMBERED.fullmatch(below.name))
    ]
    return [below for _, below in sorted(found, reverse=True)]


def trained_as(checkpoint: Path, *, trust: bool = False) -> TrainedAs:
    """Read what a policy is played with from a checkpoint.

    Args:
        checkpoint: The checkpoint.
        trust: Unpickle it, which runs what its author put into it.

    Raises:
        ValueError: It is not one of GiGPO, or cannot be read here.
    """
    try:
        path = checkpoint / _SETTINGS
        if trust:
            with path.open("rb") as file:
                settings = pickle.load(file)["ctor_args_and_kwargs"][0][0]
        else:
            settings = _plain_settings(path)
        own = (settings.get("evaluation_config") or {}).get("env_config") or {}
        return TrainedAs(
            env=settings["env"],
            env_config={**(settings.get("env_config") or {}), **own},
            profile=settings["profile"],
            max_prompt_tokens=settings["max_prompt_tokens"],
            max_response_tokens=settings["max_response_tokens"],
            eval_temperature=settings["eval_temperature"],
            max_episode_steps=settings["max_episode_steps"],
            has_adapter=settings["lora"] is not None,
        )
    except safe_pickle.UntrustedPickleError as error:
        raise ValueError(
            f"the settings of checkpoint {str(checkpoint)!r} are not read, because that would run "
            f"code ({error}): say --trust-checkpoint (in Python trust=True) if you trust its author"
        ) from error
    except (
        OSError,
        EOFError,
        LookupError,
        AttributeError,
        ImportError,
        TypeError,
        pickle.UnpicklingError,
    ) as error:
        raise ValueError(
            f"the settings of checkpoint {str(checkpoint)!r} cannot be read "
            f"({type(error).__name__}: {error}): expected one that algorithm.save_to_path(...) of "
            "GiGPO or Tune wrote, and what it was trained with importable from here"
        ) from error


def _plain_settings(path: Path) -> dict[str, Any]:
    """Read the settings without running code; those that are needed hold nothing unknown."""
    settings = safe_pickle.read(path)["ctor_args_and_kwargs"][0][0]
    for name in _NEEDED:
        safe_pickle.check_known(name, settings[name])
    profile = settings["profile"]
    if profile is None:
        return settings
    if not isinstance(profile, AgentProfile):
        raise TypeError(f"the profile is a {type(profile).__name__}")
    prompt = safe_pickle.checked_again(profile.prompt)
    return {**settings, "profile": replace(profile, prompt=prompt)}


@contextmanager
def playable(model: str, *, trust: bool = False) -> Iterator[str]:
    """Give what `llm(model=...)` takes for a model; a checkpoint is exported for the while.

    Args:
        model: A checkpoint or the folder of a run with one, or any name of `llm(model=...)`.
        trust: Unpickle a checkpoint, which runs what its author put into it.

    Raises:
        ValueError: The checkpoint holds several policies, or cannot be read.
    """
    checkpoint = find_checkpoint(model)
    if checkpoint is None:
        yield model
        return
    from rllib_gigpo.checkpoints import CheckpointError
    from rllib_gigpo.export import export, module_ids

    known = module_ids(checkpoint)
    if len(known) != 1:
        raise ValueError(
            f"{str(checkpoint)!r} holds the policies {known}: write the one to play with "
            "rllib-gigpo export CHECKPOINT FOLDER --module-id NAME, and name the folder"
        )
    ray_log = logging.getLogger("ray")
    level = ray_log.level
    ray_log.setLevel(logging.ERROR)  # RLlib warns of its own deprecations
    try:
        with tempfile.TemporaryDirectory(prefix="rllib_gigpo_") as scratch:
            kind = "merged" if trained_as(checkpoint, trust=trust).has_adapter else "full"
            yield str(export(checkpoint, Path(scratch, "model"), kind, known[0], trust=trust))
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    finally:
        ray_log.setLevel(level)
