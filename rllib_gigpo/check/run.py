"""Checks a run from its settings to its first optimizer step."""

from __future__ import annotations

from collections.abc import Callable

from rllib_gigpo.check.findings import Finding, is_sound
from rllib_gigpo.check.memory import memory_part
from rllib_gigpo.check.one_step import step_part
from rllib_gigpo.check.parts import environment_part, model_part, settings_part
from rllib_gigpo.config import GiGPOConfig


def check(
    config: GiGPOConfig,
    *,
    one_step: bool = True,
    gpu_gib: float | None = None,
    told: Callable[[str, list[Finding]], None] | None = None,
) -> list[Finding]:
    """Check everything that a CPU can know of a run.

    Args:
        config: The run's settings; they are not changed.
        one_step: Whether to train a small copy of the model once.
        gpu_gib: Memory of the GPUs in GiB, if it is known.
        told: Called with the name and the findings of each part, as they come.

    Returns:
        All findings. Where settings are at fault, nothing else is looked at; where anything is, no
        step is taken.
    """
    findings: list[Finding] = []

    def look(name: str, part: Callable[[], list[Finding]]) -> None:
        found = part()
        findings.extend(found)
        if told is not None:
            told(name, found)

    look("settings", lambda: settings_part(config))
    if not is_sound(findings):
        return findings
    look("environment", lambda: environment_part(config))
    plays = is_sound(findings)
    look("model", lambda: list(model_part(config, with_prompts=plays)))
    is_there = all(f.state == "ok" for f in findings if f.part == "model")
    if is_there:
        look("memory", lambda: list(memory_part(config, gpu_gib)))
    if is_sound(findings) and one_step:
        look("one step", lambda: step_part(config))
    return findings
