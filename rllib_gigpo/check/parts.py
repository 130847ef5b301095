"""The parts of a run that are looked at before it starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.anchor_study import play_groups
from rllib_gigpo.callbacks import check_callbacks
from rllib_gigpo.check.findings import Finding
from rllib_gigpo.check_env import contract_rows
from rllib_gigpo.config import GiGPOConfig
from rllib_gigpo.encoding import Encoded, encode_chat
from rllib_gigpo.models import (
    load_generation_config,
    load_tokenizer,
    materialize,
    stop_token_ids,
)
from rllib_gigpo.registry import LLMEnvSpec
from rllib_gigpo.scripted import Step, random_legal
from rllib_gigpo.validation import setting_faults
from rllib_gigpo.vision.sight import load_sight

# So many groups of so many random episodes show what prompts look like.
_GROUPS, _GROUP_SIZE = 2, 2


def settings_part(config: GiGPOConfig) -> list[Finding]:
    """Collect every fault of the settings."""
    faults = list(setting_faults(config))
    if not faults:
        try:
            check_callbacks(config)
            config.copy(copy_frozen=False).validate()
        except Exception as error:  # RLlib raises many kinds, and what it says is reported
            faults = [str(error)]
    if faults:
        return [Finding("settings", "FAULT", fault) for fault in faults]
    rows = f"{config.num_groups} groups x {config.group_size} episodes"
    told = f"{config.algorithm_name} on {config.env}, {rows}, every setting is valid"
    return [Finding("settings", "ok", told)]


def environment_part(config: GiGPOConfig) -> list[Finding]:
    """Check that training and evaluation environments are there and keep the contract."""
    findings: list[Finding] = []
    spec = _with(config.env_spec, config.env_config)
    made = _made("environment", spec)
    if made.state == "FAULT" or config.is_multi_agent:
        findings.append(made)
    else:
        rows, is_kept = contract_rows(spec)
        findings += [
            Finding("environment", "note", result.removeprefix("note: "))
            if result.startswith("note: ")
            else Finding("environment", "FAULT", f"{what}: {result}")
            for what, result in rows
            if result != "ok"
        ]
        if is_kept:
            findings.append(Finding("environment", "ok", f"{len(rows)} checks of the contract"))
    other = (config.evaluation_config or {}).get("env_config")
    if other is not None:
        findings.append(_made("evaluation", _with(config.env_spec, other)))
    return findings


def _with(spec: LLMEnvSpec, env_config: Any) -> LLMEnvSpec:
    return replace(spec, defaults={**spec.defaults, **dict(env_config)})


def _made(part: str, spec: LLMEnvSpec) -> Finding:
    """Make and reset an environment: its data must be there."""
    try:
        env = spec.make()
        env.reset(seed=1)
        env.close()
    except Exception as error:  # whatever an environment raises is what is reported
        return Finding(part, "FAULT", f"{type(error).__name__}: {error}")
    return Finding(part, "ok", f"{spec.name} can be made and reset")


def model_part(config: GiGPOConfig, *, with_prompts: bool = True) -> Iterator[Finding]:
    """Check the model's files, chat template and stop tokens, and the lengths of prompts.

    Args:
        config: The settings.
        with_prompts: Whether the environment can be played to see its prompts.
    """
    if not with_prompts and config.llm_model == "tiny":
        yield Finding("model", "note", "not looked at: its words are those of the environment")
        return
    try:
        path = materialize(config.model_spec)
        tokenizer = load_tokenizer(path)
        generation = load_generation_config(path)
    except (ValueError, ImportError) as error:
        yield Finding("model", "FAULT", str(error))
        return
    ids = stop_token_ids(tokenizer, generation)
    names = ", ".join(repr(tokenizer.convert_ids_to_tokens(token)) for token in ids)
    profile = config.agent_profile
    if ids:
        strings = ", ".join(map(repr, profile.stop)) or "none"
        yield Finding("model", "ok", f"chat template; stop tokens {names}; stop strings {strings}")
    else:
        yield Finding(
            "model",
            "FAULT",
            "no token ends an answer: set eos_token_id in the model's generation_config.json",
        )
    if config.is_multi_agent or not with_prompts:
        return
    steps = random_steps(config)
    longest = max(len(prompt.ids) for prompt in prompts_of(config, steps))
    limit = config.max_prompt_tokens
    told = f"the longest of {len(steps)} random prompts has {longest} tokens, the limit is {limit}"
    if longest <= limit:
        yield Finding("prompts", "ok", told)
    elif config.on_long_prompt == "error":
        yield Finding(
            "prompts",
            "FAULT",
            f"{told}: raise max_prompt_tokens, or set agent(on_long_prompt='shorten_observation')",
        )
    else:
        yield Finding("prompts", "note", f"{told}: {config.on_long_prompt} will happen")
    shown = [profile.respond.format(action=step.action) for step in steps]
    needed = max(len(tokenizer(text, add_special_tokens=False).input_ids) for text in shown)
    if needed > config.max_response_tokens:
        yield Finding(
            "prompts",
            "FAULT",
            f"a response without a thought takes {needed} tokens and max_response_tokens="
            f"{config.max_response_tokens}: raise it",
        )
    yield from _lost_actions(set(shown), profile, tokenizer)


def _lost_actions(responses: Iterable[str], profile: AgentProfile, tokenizer: Any) -> list[Finding]:
    """Find actions that are others once the tokenizer has written them and read them back.

    The words of a model from scratch are joined by blanks, for example, which JSON does not bear.
    """
    back = {
        text: tokenizer.decode(
            tokenizer(text, add_special_tokens=False).input_ids, skip_special_tokens=True
        )
        for text in responses
    }
    lost = sorted(text for text in back if profile.read(back[text]) != profile.read(text))
    if not lost:
        return []
    state = "FAULT" if len(lost) == len(back) else "note"
    told = (
        f"{len(lost)} of {len(back)} possible responses lose their action in the model's "
        f"tokenizer, which makes {back[lost[0]]!r} of {lost[0]!r}: use another model"
    )
    return [Finding("prompts", state, told)]


def random_steps(config: GiGPOConfig) -> list[Step]:
    """Play some random episodes of a run's environment, for one agent, and return their steps."""
    env = _with(config.env_spec, config.env_config).make()
    played = play_groups(
        env, config.agent_profile, random_legal, groups=_GROUPS, group_size=_GROUP_SIZE, seed=1
    )
    env.close()
    return [step for group in played for episode in group for step in episode.steps]


def prompts_of(config: GiGPOConfig, steps: Iterable[Step]) -> list[Encoded]:
    """Return the prompts of steps as the run's model reads them."""
    path = materialize(config.model_spec)
    tokenizer, sight, profile = load_tokenizer(path), load_sight(path), config.agent_profile
    return [
        encode_chat(tokenizer, profile.prompt(s.context), s.context.pictures, sight) for s in steps
    ]
