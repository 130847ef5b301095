"""Checks an environment before anything is trained on it.

    python -m rllib_gigpo.check_env KeyDoor
    python -m rllib_gigpo.check_env my_module:MyEnv --env-config '{"size": 5}' --model tiny

Prints whether the environment keeps the contract, how random and expert episodes go, what the
prompts cost in tokens, and whether GiGPO's step advantages have states to compare. The exit status
is 1 when the contract is broken.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing

import numpy as np

from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.anchor_study import (
    AnchorStudy,
    histogram_header,
    play_groups,
    study,
    verdict,
)
from rllib_gigpo.commands import env_of
from rllib_gigpo.encoding import encode_chat
from rllib_gigpo.env_checks import CHECKS, ContractNote
from rllib_gigpo.grouping import AnchorRule
from rllib_gigpo.models import FROM_SCRATCH, ModelSpec, load_tokenizer, materialize
from rllib_gigpo.registry import LLMEnvSpec
from rllib_gigpo.scripted import Policy, ScriptedEpisode, expert, half_expert, random_legal
from rllib_gigpo.tables import format_table
from rllib_gigpo.vision.sight import load_sight
from rllib_gigpo.vocabulary import collect_words
from rllib_gigpo_cli.parsers import check_env_parser

Groups = list[list[ScriptedEpisode]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check what the command line names and return the exit status."""
    parser = check_env_parser()
    args = parser.parse_args(arguments)
    rule = rule_of(parser, args)
    spec, profile = env_of(parser, args)
    rows, is_kept = contract_rows(spec)
    print(format_table(f"contract of {spec.name}", ("check", "result"), rows), flush=True)
    if not is_kept:
        print("\nThe contract is broken: mend the environment before training on it.")
        return 1
    played = play(spec, profile, args)
    found = {name: study(groups, rule, args.gamma) for name, groups in played.items()}
    print(f"\n{_study_tables(found, rule, args)}")
    print(f"\n{_token_table(spec, profile, played, args.model)}")
    judged = "half expert" if "half expert" in found else "random"
    print(f"\n{verdict(found[judged])} (policy: {judged})")
    return 0


def rule_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> AnchorRule:
    """Return which steps count as taken from the same state; a flag without effect is refused."""
    flags = {"threshold": args.similarity_threshold, "measure": args.similarity_measure}
    given = {name: value for name, value in flags.items() if value is not None}
    if given and args.anchor != "similarity":
        name = next(iter(given))
        parser.error(f"--similarity-{name} is of --anchor similarity: add that, or leave it out")
    return AnchorRule(args.anchor, **given)


def contract_rows(spec: LLMEnvSpec) -> tuple[list[tuple[str, str]], bool]:
    """Run every check of the contract.

    Returns:
        One row (what is checked; "ok", "note: ..." or "BROKEN: ...") per check, and whether the
        contract is kept, as it is with notes.
    """
    rows, is_kept = [], True
    for check in CHECKS:
        assert check.__doc__ is not None
        try:
            check(spec.make, random_legal)
            result = "ok"
        except ContractNote as note:
            result = f"note: {note}"
        except Exception as error:  # whatever an environment raises is what is reported
            result = f"BROKEN: {type(error).__name__}: {error}"
            is_kept = False
        rows.append((check.__doc__.splitlines()[0].rstrip("."), result))
    return rows, is_kept


def play(spec: LLMEnvSpec, profile: AgentProfile, args: argparse.Namespace) -> dict[str, Groups]:
    """Play groups of episodes with every policy that the environment has."""
    env = spec.make()
    policies: dict[str, Policy] = {"random": random_legal}
    if hasattr(env.unwrapped, "expert_action"):
        policies |= {"half expert": half_expert, "expert": expert}
    played: dict[str, Groups] = {}
    with closing(env):
        for name, policy in policies.items():
            try:
                played[name] = play_groups(
                    env,
                    profile,
                    policy,
                    groups=max(1, args.episodes // args.group_size),
                    group_size=args.group_size,
                    seed=args.seed,
                )
            except ValueError as error:
                if policy is random_legal:
                    raise
                print(f"\nnot played by {name}: {error}")
    return played


def _study_tables(found: dict[str, AnchorStudy], rule: AnchorRule, args: argparse.Namespace) -> str:
    groups = max(1, args.episodes // args.group_size)
    episodes = format_table(
        f"{groups} groups of {args.group_size} episodes",
        ("policy", "success", "return", "length", "longest", "invalid actions"),
        [
            (
                name,
                "not told" if f.success is None else f"{f.success:.1%}",
                f.return_mean,
                f.length_mean,
                f.length_max,
                f"{f.invalid_share:.1%}",
            )
            for name, f in found.items()
        ],
    )
    how = f" of {rule.threshold:g} by {rule.measure}" if rule.kind == "similarity" else ""
    anchors = format_table(
        f"will GiGPO help here: steps by size of their anchor group (anchor: {rule.kind}{how}), "
        f"and those with an advantage (gamma {args.gamma:g})",
        ("policy", *histogram_header(), "repeated", "step advantage", "episode advantage"),
        [
            (
                name,
                *(f"{share:.1%}" for share in f.step_shares),
                f"{f.repeat_share:.1%}",
                f"{f.step_advantage_share:.1%}",
                f"{f.episode_advantage_share:.1%}",
            )
            for name, f in found.items()
        ],
    )
    return f"{episodes}\n\n{anchors}"


def _token_table(
    spec: LLMEnvSpec, profile: AgentProfile, played: dict[str, Groups], model: str
) -> str:
    path = materialize(_model_spec(spec, profile, model))
    tokenizer, sight = load_tokenizer(path), load_sight(path)
    rows = []
    for name, groups in played.items():
        steps = [s for episodes in groups for episode in episodes for s in episode.steps]
        prompts = [
            len(
                encode_chat(
                    tokenizer, profile.prompt(step.context), step.context.pictures, sight
                ).ids
            )
            for step in steps
        ]
        texts = {profile.respond.format(action=step.action) for step in steps}
        responses = [len(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
        rows.append(
            (
                name,
                float(np.mean(prompts)),
                int(np.percentile(prompts, 95)),
                max(prompts),
                max(responses),
            )
        )
    header = ("policy", "mean", "95 %", "longest", "longest response (without a thought)")
    return format_table(f"prompt tokens per step, tokenizer of {model}", header, rows)


def _model_spec(spec: LLMEnvSpec, profile: AgentProfile, model: str) -> ModelSpec:
    if model not in FROM_SCRATCH:
        return ModelSpec(model)
    return ModelSpec(model, words=collect_words(spec.make(), profile))


if __name__ == "__main__":
    sys.exit(main())
