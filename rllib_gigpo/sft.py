"""Supervised warm start on the prompts and the token path of RL.

    recordings (played by a random or expert policy) -> rows -> warm_start -> a model folder

The folder is then the model of the RL run: `GiGPOConfig().llm(model=folder)`.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.agent.prompt import Message, PromptContext
from rllib_gigpo.encoding import PromptEncoder
from rllib_gigpo.games import Game
from rllib_gigpo.models import load_causal_lm, load_tokenizer
from rllib_gigpo.sequences import pack, response_logps

Policy = Callable[[Any, str, Mapping[str, Any], random.Random], str]


@dataclass(frozen=True)
class Example:
    """One prompt and the response to imitate.

    Attributes:
        messages: Chat messages of the prompt.
        response: Response text.
    """

    messages: list[Message]
    response: str


@dataclass(frozen=True)
class WarmStart:
    """Settings of a warm start.

    Attributes:
        steps: Optimizer steps.
        batch_size: Examples per step.
        lr: Peak learning rate of AdamW; linear warm-up, then linear decay to a tenth.
        warmup_steps: Steps of the warm-up.
        seed: Seed of the order of the examples.
        token_budget: Padded tokens of one forward pass.
        dtype: What matrix products run in, "float32" or "bfloat16"; parameters stay fp32.
    """

    steps: int = 60
    batch_size: int = 64
    lr: float = 3e-3
    warmup_steps: int = 20
    seed: int = 0
    token_budget: int = 16384
    dtype: str = "float32"


def random_legal(env: Any, observation: str, info: Mapping[str, Any], rng: random.Random) -> str:
    """Pick one of the admissible actions.

    Raises:
        ValueError: The environment offers none.
    """
    offered = info.get("admissible_actions")
    if not offered:
        raise ValueError(
            "the environment offers no info['admissible_actions'] to draw from: record an expert "
            "instead (an environment with expert_action())"
        )
    return rng.choice(list(offered))


def expert(env: Any, observation: str, info: Mapping[str, Any], rng: random.Random) -> str:
    """Ask the environment's own expert.

    Raises:
        ValueError: The environment has none.
    """
    own = getattr(env, "unwrapped", env)
    if not hasattr(own, "expert_action"):
        raise ValueError(
            f"{type(own).__name__} has no expert_action(): record random_legal instead"
        )
    return own.expert_action()


def record(
    make_env: Callable[[], Any],
    profile: AgentProfile,
    *,
    policy: Policy = random_legal,
    episodes: int,
    seed: int = 0,
    options: Sequence[Mapping[str, Any]] | None = None,
) -> list[Example]:
    """Play episodes and keep every step as an example.

    Args:
        make_env: Makes the environment.
        profile: The agent whose prompts and response format are recorded.
        policy: Picks the action text.
        episodes: Number of episodes.
        seed: Episode e resets with seed `seed + e`.
        options: Reset options of each episode, such as fixed task ids.

    Returns:
        Examples in the order played.
    """
    game = Game(make_env(), "the recorded environment")
    rng = random.Random(seed)
    examples = []
    for number in range(episodes):
        observations, infos = game.reset(seed + number, options[number] if options else None)
        memories: dict[Any, Any] = {}
        steps: dict[Any, int] = {}
        tasks: dict[Any, str] = {}
        while not game.is_done:
            actions = {}
            for agent, observation in observations.items():
                info = infos.get(agent, {})
                memory = memories.setdefault(agent, copy.deepcopy(profile.memory))
                tasks[agent] = info.get("task", tasks.get(agent, ""))
                history, shown = memory.render()
                context = PromptContext(
                    task=tasks[agent],
                    observation=observation,
                    history=history,
                    history_length=shown,
                    step=steps.get(agent, 0),
                    admissible_actions=tuple(info.get("admissible_actions", ())),
                    info=info,
                )
                actions[agent] = policy(game.env, observation, info, rng)
                examples.append(
                    Example(profile.prompt(context), profile.respond.format(action=actions[agent]))
                )
            before = observations
            outcome = game.step(actions)
            for agent, action in actions.items():
                memories[agent].add(before[agent], action, outcome.infos.get(agent, {}))
                steps[agent] = steps.get(agent, 0) + 1
            observations, infos = outcome.observations, outcome.infos
    game.close()
    return examples


def save_examples(examples: Iterable[Example], path: str | Path) -> None:
    """Write examples as JSON lines: {"messages": [...], "response": "..."}."""
    with open(path, "w", encoding="utf-8") as file:
        for example in examples:
            file.write(json.dumps(asdict(example), ensure_ascii=False) + "\n")


def load_examples(path: str | Path) -> list[Example]:
    """Read what `save_examples` wrote.

    Raises:
        ValueError: A line is no such object; its number is named.
    """
    examples = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                examples.append(Example(list(row["messages"]), str(row["response"])))
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: expected an object with 'messages' and 'response' "
                    f"({type(error).__name__}: {error})"
                ) from error
    return examples


def warm_start(
    model_path: str,
    examples: Sequence[Example],
    output: str | Path,
    *,
    profile: AgentProfile,
    settings: WarmStart = WarmStart(),
    max_prompt_tokens: int = 2048,
    on_step: Callable[[int, float], None] | None = None,
) -> Path:
    """Train a model on examples and save it as a Hugging Face folder.

    The loss is the mean negative log-probability of the response tokens.

    Args:
        model_path: What `materialize` returned.
        examples: Prompts and responses.
        output: Folder to write.
        profile: The agent profile; where it has no stop string, the model's end token is appended
            to each response.
        settings: Steps, batch size, learning rate.
        max_prompt_tokens: Longer prompts raise.
        on_step: Called with (step, loss).

    Returns:
        `output`.

    Raises:
        ValueError: No example.
    """
    if not examples:
        raise ValueError("warm_start needs at least one example, got none")
    tokenizer = load_tokenizer(model_path)
    encoder = PromptEncoder(tokenizer, profile, max_prompt_tokens)
    end: list[Any] = [] if profile.stop else [tokenizer.eos_token_id]
    prompts = [encoder.tokenize(example.messages) for example in examples]
    responses = [_response_ids(tokenizer, example.response, end) for example in examples]
    longest = max(map(len, prompts))
    if longest > max_prompt_tokens:
        raise ValueError(
            f"an example's prompt has {longest} tokens, max_prompt_tokens is {max_prompt_tokens}: "
            "raise it or record with a shorter memory"
        )
    model = load_causal_lm(model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0)
    rng = np.random.default_rng(settings.seed)
    order = np.concatenate(
        [rng.permutation(len(examples)) for _ in range(_passes(settings, len(examples)))]
    )
    for step in range(settings.steps):
        chosen = order[step * settings.batch_size : (step + 1) * settings.batch_size]
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * _schedule(step, settings)
        optimizer.zero_grad(set_to_none=True)
        loss = _backward(
            model, [prompts[i] for i in chosen], [responses[i] for i in chosen], settings
        )
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if on_step is not None:
            on_step(step, loss)
    output = Path(output)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    return output


def _response_ids(tokenizer: Any, text: str, end: list[Any]) -> np.ndarray:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return np.array([*ids, *end], dtype=np.int32)


def _passes(settings: WarmStart, num_examples: int) -> int:
    return -(-settings.steps * settings.batch_size // num_examples)


def _schedule(step: int, settings: WarmStart) -> float:
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return 1.0 - 0.9 * done


def _backward(
    model: Any, prompts: list[np.ndarray], responses: list[np.ndarray], settings: WarmStart
) -> float:
    tokens = sum(map(len, responses))
    total = 0.0
    for batch in pack(prompts, responses, settings.token_budget):
        with torch.autocast(model.device.type, torch.bfloat16, settings.dtype == "bfloat16"):
            loss = -response_logps(model, batch).logps.sum() / tokens
        loss.backward()
        total += loss.item()
    return total
