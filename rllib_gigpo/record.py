"""Recordings for a supervised warm start: prompts and the responses to imitate, as JSON lines.

    python -m rllib_gigpo.record ALFWorld --policy expert --episodes 64 --output expert.jsonl

plays an environment with its expert, or with random legal actions, which teach the response format
alone. `python -m rllib_gigpo.sft` trains a model on the file.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.agent.prompt import Message
from rllib_gigpo.commands import env_of
from rllib_gigpo.games import Game
from rllib_gigpo.registry import load_object
from rllib_gigpo.scripted import Policy, ScriptedEpisode, Step, expert, play_episode, random_legal
from rllib_gigpo.vision.files import picture_of_png, png_of_picture
from rllib_gigpo.vision.pictures import Gallery, Picture, names_of_marks
from rllib_gigpo_cli.parsers import record_parser

_POLICIES: dict[str, Policy] = {"expert": expert, "random": random_legal}


@dataclass(frozen=True)
class Example:
    """One prompt and the response to imitate.

    Attributes:
        messages: Chat messages of the prompt.
        response: Response text.
        ends_turn: Whether the model's end token follows the response; it does not where a stop
            string ends the response.
        pictures: The pictures of the marks in the messages, by name.
    """

    messages: list[Message]
    response: str
    ends_turn: bool = True
    pictures: Mapping[str, Picture] = field(default_factory=dict)


def record(
    make_env: Callable[[], Any],
    profile: AgentProfile,
    *,
    policy: Policy = random_legal,
    episodes: int,
    seed: int = 0,
    options: Sequence[Mapping[str, Any]] | None = None,
    keep: Callable[[ScriptedEpisode], bool] = lambda episode: True,
) -> list[Example]:
    """Play episodes and keep every step as an example.

    Args:
        make_env: Makes the environment.
        profile: The agent whose prompts and response format are recorded.
        policy: Picks the action text.
        episodes: Number of episodes.
        seed: Episode e resets with seed `seed + e`.
        options: Reset options of each episode, such as fixed task ids.
        keep: Which episodes are kept.

    Returns:
        Examples in the order played.
    """
    rng = random.Random(seed)
    gallery = Gallery()
    examples = []
    with closing(Game(make_env(), "the recorded environment")) as game:
        for number in range(episodes):
            episode = play_episode(
                game,
                profile,
                policy,
                rng,
                seed=seed + number,
                options=options[number] if options else None,
                gallery=gallery,
            )
            if keep(episode):
                examples += [_example(profile, step) for step in episode.steps]
    return examples


def _example(profile: AgentProfile, step: Step) -> Example:
    messages = profile.prompt(step.context)
    texts = [message["content"] for message in messages]
    return Example(
        messages,
        profile.respond.format(action=step.action),
        ends_turn=not profile.stop,
        pictures={
            name: picture
            for name, picture in step.context.pictures.items()
            if any(picture.mark in text for text in texts)
        },
    )


def save_examples(examples: Iterable[Example], path: str | Path) -> None:
    """Write examples as JSON lines, `{"messages": [...], "response": "...", "ends_turn": ...}`.

    The first line that shows a picture holds it, under "pictures", as a PNG file in base64.
    """
    written: set[str] = set()
    with open(path, "w", encoding="utf-8") as file:
        for example in examples:
            row: dict[str, Any] = {
                "messages": example.messages,
                "response": example.response,
                "ends_turn": example.ends_turn,
            }
            new = {n: p for n, p in example.pictures.items() if n not in written}
            if new:
                row["pictures"] = {name: png_of_picture(picture) for name, picture in new.items()}
                written |= new.keys()
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def load_examples(path: str | Path) -> list[Example]:
    """Read what `save_examples` wrote; where `ends_turn` is missing, it is true.

    Raises:
        ValueError: A line is no such object, or its picture no PNG file; its number is named.
    """
    examples = []
    gallery: dict[str, Picture] = {}
    with open(path, "rb") as file:  # so that bytes that are no UTF-8 have a line too
        for number, line in enumerate(file, start=1):
            try:
                examples.append(_parse(json.loads(line.decode()), gallery))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(
                    f"{path}, line {number}: expected an object with 'messages' and 'response' "
                    f"({type(error).__name__}: {error})"
                ) from error
    return examples


def _parse(row: Any, gallery: dict[str, Picture]) -> Example:
    messages, response = row["messages"], row["response"]
    if not isinstance(messages, list) or not isinstance(response, str):
        raise TypeError("'messages' is to be a list and 'response' a text")
    for message in messages:
        if not isinstance(message["role"], str) or not isinstance(message["content"], str):
            raise TypeError("'role' and 'content' of a message are to be texts")
    pictures = row.get("pictures", {})
    if not isinstance(pictures, dict):
        raise TypeError("'pictures' is to be an object of names and PNG files in base64")
    for name, png in pictures.items():
        picture = _picture(name, png)
        gallery[picture.name] = picture
    shown = {
        name: gallery[name] for message in messages for name in names_of_marks(message["content"])
    }
    return Example(messages, response, bool(row.get("ends_turn", True)), shown)


def _picture(name: str, png: Any) -> Picture:
    try:
        return picture_of_png(png)
    except Exception as error:  # Pillow's readers raise of any kind
        told = f"picture {name!r} is no PNG file in base64 ({type(error).__name__}: {error})"
        raise ValueError(told) from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Record what the command line says."""
    parser = record_parser()
    args = parser.parse_args(arguments)
    spec, profile = env_of(parser, args)
    try:
        policy = _POLICIES.get(args.policy) or load_object(args.policy)
    except ValueError as error:
        parser.error(f"--policy: {error}; or one of {sorted(_POLICIES)}")
    played: list[ScriptedEpisode] = []

    def keep(episode: ScriptedEpisode) -> bool:
        played.append(episode)
        return not args.only_won or bool(episode.verdict.get("won"))

    examples = record(
        spec.make, profile, policy=policy, episodes=args.episodes, seed=args.seed, keep=keep
    )
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    save_examples(examples, output)
    won = [episode.verdict["won"] for episode in played if "won" in episode.verdict]
    success = f", {sum(won) / len(won):.1%} won" if won else ""
    print(
        f"{args.policy} policy on {spec.name}: {len(played)} episodes{success}; {len(examples)} "
        f"steps in {output}"
    )


if __name__ == "__main__":
    main()
