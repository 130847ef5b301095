"""Several policies: whose returns are compared, what a policy may have of its own, shared bases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ray.rllib.policy.sample_batch import MultiAgentBatch

from envs.key_door_team import KeyDoorTeam
from rllib_gigpo import GiGPOConfig
from rllib_gigpo.advantages import StepTable, gigpo, pool_agents
from rllib_gigpo.agent import AgentProfile, ChatTemplate, NoMemory
from rllib_gigpo.encoding import PromptEncoder
from rllib_gigpo.engines.base import Sampling
from rllib_gigpo.module import CausalLMModule
from rllib_gigpo.rollout_types import Voice
from rllib_gigpo.rows import agent_episodes, complete_batch
from tests.stage import TOKENIZER, Stage, task
from tests.tiny_runs import SHAPE, build_learner, random_rows, tiny_config

TABLE = StepTable(
    group=np.zeros(4, int),
    episode=np.array([0, 0, 1, 1]),
    agent=np.array([0, 1, 0, 1]),
    step=np.zeros(4, int),
    anchor=np.zeros(4, int),
    reward=np.array([0.0, 10.0, 2.0, 14.0]),
    valid=np.ones(4, bool),
)


def test_whose_returns_are_compared():
    # Agent 0 earns 0 and 2, mean 1; agent 1 earns 10 and 14, mean 12.
    own = gigpo(TABLE, omega=0.0, f_norm="none").total
    np.testing.assert_allclose(own, [-1.0, -2.0, 1.0, 2.0])
    # All four together: mean (0 + 10 + 2 + 14) / 4 = 6.5.
    pooled = gigpo(pool_agents(TABLE), omega=0.0, f_norm="none").total
    np.testing.assert_allclose(pooled, [-6.5, 3.5, -4.5, 7.5])


def test_anchor_groups_stay_an_agents_own():
    # The same anchor id for both agents; each agent's two steps form a group of their own.
    found = gigpo(pool_agents(TABLE), episode_weight=0.0, f_norm="none")
    np.testing.assert_allclose(found.step, [-1.0, -2.0, 1.0, 2.0])
    assert found.step_group_size.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize(("normalize_over", "expected"), [("agent", -2.0), ("policy", 3.5)])
def test_the_setting_reaches_the_learner(normalize_over, expected):
    rows = random_rows(4, steps=1, group_size=4)
    rows["group"], rows["agent"] = np.zeros(4, int), TABLE.agent
    rows["episode"], rows["reward"] = TABLE.episode, TABLE.reward
    learner = build_learner(omega=0.0, f_norm="none", normalize_over=normalize_over)
    learner.update(
        batch=MultiAgentBatch({"default_policy": complete_batch(rows)}, 4),
        timesteps={"num_env_steps_sampled_lifetime": 0},
    )
    assert learner.advantages["default_policy"].total[1] == pytest.approx(expected)


def team(**own) -> GiGPOConfig:
    return (
        tiny_config()
        .environment("KeyDoorTeam")
        .multi_agent(
            policies={"first", "second"},
            policy_mapping_fn=lambda agent, *_, **__: "first" if agent == "agent_0" else "second",
            algorithm_config_overrides_per_module=own,
        )
    )


def test_a_policy_has_settings_of_its_own():
    config = team(second={"lr": 0.5, "kl_coeff": 0.25})
    config.validate()
    assert config.get_config_for_module("first").lr == 0.1
    own = config.get_config_for_module("second")
    assert (own.lr, own.kl_coeff, own.gamma) == (0.5, 0.25, config.gamma)
    modules = config.get_multi_rl_module_spec(
        spaces=dict.fromkeys(config.module_ids, (None, None))
    ).rl_module_specs
    assert modules["second"].model_config["with_reference"] is True
    assert modules["first"].model_config["with_reference"] is False


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: team(third={"lr": 1.0}), "no such policy, only first, second"),
        (lambda: team(first={"num_groups": 2}), "sets 'num_groups', which all policies share"),
        (lambda: team(first={"lr": -1.0}), "lr=-1.0: expected a finite number"),
        (
            lambda: team().multi_agent(policies_to_train=["frist"]),
            "no policy 'frist', only first, second",
        ),
    ],
)
def test_settings_that_nobody_would_read_are_refused(config, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is checked below
        config().validate()
    assert message in str(error.value)


def test_policies_are_spoken_to_in_their_own_words():
    profile = AgentProfile(ChatTemplate("door {observation}"), memory=NoMemory())
    voice = Voice(profile, PromptEncoder(TOKENIZER, profile, 200, "error"), Sampling(max_tokens=3))
    stage = Stage("nonsense", make=KeyDoorTeam, policy_of=str, max_episode_steps=1)
    object.__setattr__(stage.settings, "voices", {"agent_1": voice})
    (episode,) = stage.play(task(env_seed=4))
    assert [agent for agent, _ in agent_episodes(episode)] == ["agent_0"]
    stage = Stage("nonsense", make=KeyDoorTeam, policy_of=str, max_episode_steps=2)
    object.__setattr__(stage.settings, "voices", {"agent_1": voice})
    stage.play(task(env_seed=4))
    first, second, _ = stage.engine.requests
    assert (first.sampling.max_tokens, second.sampling.max_tokens) == (10, 3)
    texts = [TOKENIZER.decode(request.prompt_ids) for request in (first, second)]
    assert [text.split().count("door") for text in texts] == [1, 2]


def test_a_device_is_given_the_shared_base_once(monkeypatch):
    pytest.importorskip("peft")
    from rllib_gigpo.lora import LoRASettings

    agents = {"first", "second", "third", "other"}
    config = (
        team()
        .llm(lora=LoRASettings(rank=2))
        .multi_agent(
            policies=agents,
            algorithm_config_overrides_per_module={
                "other": {"llm_options": {**SHAPE, "num_layers": 2}}
            },
        )
    )
    there: dict[int, int] = {}  # numbers on a device that is not the CPU, by their place

    def move(module: CausalLMModule, device: str) -> None:
        for parameter in module.parameters():
            if parameter.data_ptr() not in there:
                parameter.data = parameter.data.clone()
                there[parameter.data_ptr()] = parameter.numel()

    monkeypatch.setattr(CausalLMModule, "to", move)
    learner = build_learner(config)
    models = {name: learner.module[name].unwrapped().lm for name in agents}
    adapters = sum(p.numel() for m in models.values() for p in m.parameters() if p.requires_grad)
    bases = [
        sum(p.numel() for p in models[name].parameters() if not p.requires_grad)
        for name in ("first", "other")
    ]
    assert bases[0] != bases[1]
    assert sum(there.values()) == sum(bases) + adapters


def test_adapters_of_two_roles_share_one_base():
    pytest.importorskip("peft")
    from rllib_gigpo.lora import LoRASettings

    config = team().llm(lora=LoRASettings(rank=2))
    learner = build_learner(config)
    first, second = (learner.module[name].unwrapped().lm for name in ("first", "second"))
    shared = {n: p for n, p in first.named_parameters() if not p.requires_grad}
    for name, parameter in second.named_parameters():
        if name in shared:
            assert parameter.data_ptr() == shared[name].data_ptr()
        else:
            assert parameter.data_ptr() != dict(first.named_parameters())[name].data_ptr()
    assert len(shared) > 5
    base = {n: p.clone() for n, p in shared.items()}
    rows = random_rows(12)
    learner.update(
        batch=MultiAgentBatch({"first": complete_batch(rows)}, 12),
        timesteps={"num_env_steps_sampled_lifetime": 0},
    )
    assert all(torch.equal(p, base[n]) for n, p in shared.items())
    adapters = [n for n, p in second.named_parameters() if n.endswith("lora_B.default.weight")]
    moved = dict(first.named_parameters())
    assert any(moved[n].abs().sum() > 0 for n in adapters)
    assert all(dict(second.named_parameters())[n].abs().sum() == 0 for n in adapters)


@pytest.mark.parametrize("saved", [None, ["second"]])
def test_who_is_trained_is_for_the_settings_of_the_run_that_goes_on(saved):
    before = build_learner(team().multi_agent(policies_to_train=saved))
    now = build_learner(team().multi_agent(policies_to_train=["first"]))
    now.set_state(before.get_state())
    policies = {name: now.module[name].unwrapped().lm for name in ("first", "second")}
    weights = {n: [p.clone() for p in lm.parameters()] for n, lm in policies.items()}
    rows = {name: complete_batch(random_rows(12)) for name in policies}
    now.update(batch=MultiAgentBatch(rows, 12), timesteps={"num_env_steps_sampled_lifetime": 0})
    moved = {
        name
        for name, lm in policies.items()
        if not all(map(torch.equal, lm.parameters(), weights[name]))
    }
    assert moved == {"first"}
