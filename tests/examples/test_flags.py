"""Flags of the tuned examples: each does something, or is refused in one sentence."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rllib_gigpo import GiGPOConfig
from rllib_gigpo.advantages import StepTable, estimate
from rllib_gigpo.advantages.registry import SETTINGS
from rllib_gigpo.agent.profiles.sokoban import profile as sokoban_profile
from rllib_gigpo.check.loading import load_config
from rllib_gigpo.presets import PRESETS

_FOLDER = Path(__file__).parents[2] / "tuned_examples"
_TEAMS = ("arithmetic_team_gigpo", "search_team_gigpo")
# Those whose settings name an environment of evaluation.
_EVALUATED = (
    "alfworld_gigpo",
    "appworld_gigpo",
    "search_gigpo",
    "search_team_gigpo",
    "sokoban_gigpo",
    "webshop_gigpo",
)


def _module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(_FOLDER))
    return importlib.import_module(name)


def _config(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> GiGPOConfig:
    """What a command trains with, before Ray tells which GPUs there are."""
    module = _module(name, monkeypatch)
    args = getattr(module, "parse", module.parser.parse_args)(list(arguments))
    config = importlib.import_module("_training").with_arguments(
        module.paper_config(args), args, gpus=8
    )
    config.validate()
    return config


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        (
            "webshop_gigpo",
            "--algo grpo --gamma 0.9",
            "--gamma 0.9 with --algo grpo and omega=0 has",
        ),
        ("webshop_gigpo", "--omega 0 --gamma 0.9", "--gamma 0.9 with --algo gigpo and omega=0 has"),
        ("webshop_gigpo", "--algo rloo --gamma 0.9", "--gamma 0.9 with --algo rloo and omega=0"),
        (
            "webshop_gigpo",
            "--algo gigpo_no_step --anchor similarity",
            "--anchor similarity with --algo gigpo_no_step and omega=0 has no effect",
        ),
        (
            "webshop_gigpo",
            "--algo ppo --anchor exact",
            "--anchor exact with --algo ppo and omega=0",
        ),
        (
            "search_gigpo",
            "--algo grpo --similarity-threshold 0.8",
            "--similarity-threshold 0.8 with --algo grpo and omega=0 has no effect",
        ),
        (
            "webshop_gigpo",
            "--similarity-threshold 0.8",
            "--similarity-threshold 0.8 with exact anchors has no effect: leave it out, or add",
        ),
        (
            "search_gigpo",
            "--anchor exact --similarity-threshold 0.8",
            "--similarity-threshold 0.8 with exact anchors has no effect",
        ),
        (
            "webshop_gigpo",
            "--num-engines 2",
            "--num-engines 2 with --engine transformers has no effect: leave it out, or use",
        ),
        ("webshop_gigpo", "--gpus-per-engine 0.5", "--gpus-per-engine 0.5 with --engine transfor"),
        (
            "appworld_gigpo",
            "--root /data",
            "--root /data without --python-executable has no effect",
        ),
        ("sokoban_gigpo", "--levels x --size 8 8", "--size [8, 8] with --levels x has no effect"),
        ("sokoban_gigpo", "--levels x --boxes 1", "--boxes 1 with --levels x has no effect"),
        (
            "search_gigpo",
            "--corpus c.jsonl --retriever http://127.0.0.1:1",
            "--corpus c.jsonl with --retriever http://127.0.0.1:1 has no effect",
        ),
        ("search_gigpo", "--retriever dense", "--retriever dense would encode the corpus in every"),
        (
            "webshop_gigpo",
            '--engine-options {"block_size":16}',
            '--engine-options {"block_size":16} with --engine transformers has no effect',
        ),
        (
            "webshop_gigpo",
            "--engine vllm --engine-options 4",
            "--engine-options '4': expected a JS",
        ),
        ("webshop_gigpo", "--set [1]", "--set '[1]': expected a JSON object of settings"),
        ("webshop_gigpo", "--set {", "--set '{' is not JSON"),
        (
            "webshop_gigpo",
            '--set {"omgea":1}',
            "--set omgea: none of llm(...), training(...), agent(...), stepping(...), "
            "evaluation(...), watchdog(...), recording(...), fault_tolerance(...), learners(...), "
            "engines(...) has such a setting; did you mean omega?",
        ),
        ("webshop_gigpo", '--set {"omega":1}', "--set omega: use --omega, which this example has"),
        (
            "webshop_gigpo",
            '--set {"sharding":"fsdp"}',
            "--set sharding: use --sharding, which this",
        ),
        # The run folder and the watchdog both have one.
        ("webshop_gigpo", '--set {"enabled":false}', "--set enabled: watchdog and recording have"),
        (
            "webshop_gigpo",
            '--algo dapo --set {"clip_param":0.3}',
            "--set clip_param=0.3 with --algo dapo: clip_param=(0.2, 0.28) is what makes this",
        ),
    ],
)
def test_what_would_do_nothing_is_refused(name, arguments, sentence, monkeypatch):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is checked
        _config(name, monkeypatch, *arguments.split())
    assert str(error.value).startswith(sentence)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("arguments", ["", "--smoke", "--cpu-demo --smoke"])
def test_walkthroughs_are_for_the_demo_on_real_games(arguments, monkeypatch):
    module = _module("alfworld_gigpo", monkeypatch)
    args = module.parser.parse_args([*arguments.split(), "--walkthroughs=walks.json"])
    with pytest.raises(ValueError, match=r"--walkthroughs walks\.json without --cpu-demo has no"):
        module.policy_of(args)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--gpus-per-engine=0.5", "--gpus-per-engine 0.5 with --engine transformers has no effect"),
        ("--cpus-per-engine=2", "--cpus-per-engine 2.0 with --engine transformers has no effect"),
        ("--population=8", "--population 8 with --scheduler grid has no effect: leave it out, or"),
    ],
)
def test_a_sweep_refuses_what_would_do_nothing(arguments, sentence, monkeypatch):
    module = _module("sweep_gigpo", monkeypatch)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is checked
        module.parse(arguments.split())
    assert str(error.value).startswith(sentence)
    module.parse(["--engine=vllm", "--gpus-per-engine=0.5", "--cpus-per-engine=2"])
    module.parse(["--scheduler=pbt", "--population=8"])


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("webshop_gigpo", "--algo hgpo --gamma 0.9 --anchor similarity", {"gamma": 0.9}),
        ("webshop_gigpo", "--algo gigpo_no_episode --gamma 0.9", {"gamma": 0.9}),
        ("search_gigpo", "--similarity-threshold 0.8", {"similarity_threshold": 0.8}),
        ("webshop_gigpo", "--anchor similarity --similarity-threshold 1", {"anchor": "similarity"}),
        ("sokoban_gigpo", "--eval-levels LEVELS --boxes 2", {}),
        (
            "webshop_gigpo",
            "--engine vllm --num-engines 2",
            {"num_engines": 2, "engine_sleep": False},
        ),
        (
            "webshop_gigpo",
            "--engine vllm --gpus-per-engine 2",
            {"engine_num_gpus": 2, "engine_options": {"tensor_parallel_size": 2}},
        ),
        (
            "webshop_gigpo",
            '--engine vllm --gpus-per-engine 0.5 --engine-options {"block_size":16}',
            {"engine_num_gpus": 0.5, "engine_sleep": True, "engine_options": {"block_size": 16}},
        ),
        (
            "webshop_gigpo",
            '--set {"lr":1e-5,"group_size":4,"max_prompt_tokens":99}',
            {"lr": 1e-5, "group_size": 4, "max_prompt_tokens": 99, "num_groups": 16},
        ),
        (
            "webshop_gigpo",
            '--set {"on_long_prompt":"end_episode","step_threads":8,"on_collapse":"stop",'
            '"use_liger_kernel":true,"activation_checkpointing":true,"weight_sync":"ray",'
            '"groups":2,"heartbeat_timeout_s":9,"evaluation_samples_per_task":3}',
            {
                "on_long_prompt": "end_episode",
                "step_threads": 8,
                "on_collapse": "stop",
                "use_liger_kernel": True,
                "activation_checkpointing": True,
                "weight_sync": "ray",
                "record_groups": 2,
                "heartbeat_timeout_s": 9,
                "evaluation_samples_per_task": 3,
            },
        ),
        ("webshop_gigpo", "--trackers wandb trackio", {"trackers": ["wandb", "trackio"]}),
    ],
)
def test_what_does_something_is_taken(name, arguments, expected, tmp_path, monkeypatch):
    (tmp_path / "levels.txt").write_text("; 0\n#####\n#@$.#\n#####\n")
    words = arguments.replace("LEVELS", str(tmp_path)).split()
    config = _config(name, monkeypatch, *words)
    assert {setting: getattr(config, setting) for setting in expected} == expected


# Two episodes of three steps in one group; the first is rewarded, and both return to a state.
_ROWS = StepTable(
    group=np.zeros(6, dtype=np.int64),
    episode=np.repeat([0, 1], 3),
    agent=np.zeros(6, dtype=np.int64),
    step=np.tile([0, 1, 2], 2),
    anchor=np.array([0, 1, 0, 0, 1, 2]),
    reward=np.array([0.0, 0.0, 4.0, 0.0, 1.0, 0.0]),
    valid=np.ones(6, dtype=bool),
)


def _advantages(config: GiGPOConfig, table: StepTable = _ROWS) -> np.ndarray:
    settings: dict[str, Any] = {name: getattr(config, name) for name in SETTINGS}
    columns = {"value": np.arange(6.0), "bootstrap": np.zeros(6), "response_tokens": np.ones(6)}
    return estimate(config.advantage_estimator, table, settings=settings, columns=columns).total


@pytest.mark.parametrize("algo", PRESETS)
@pytest.mark.parametrize(
    ("flag", "value"),
    [("omega", 0.5), ("gamma", 0.5), ("f_norm", "std"), ("f_norm", "none"), ("anchor", "exact")],
)
def test_a_flag_is_taken_where_it_changes_advantages(algo, flag, value, monkeypatch):
    plain = _config("webshop_gigpo", monkeypatch, "--algo", algo)
    words = ["--algo", algo, f"--{flag.replace('_', '-')}", str(value)]
    try:
        config = _config("webshop_gigpo", monkeypatch, *words)
    except ValueError as error:
        if "is what makes this algorithm" in str(error):
            return
        config, is_taken = plain.copy(copy_frozen=False).training(**{flag: value}), False
    else:
        is_taken = True
        assert getattr(config, flag) == value
    if flag == "anchor":
        # What a rule of another kind would find: every state for itself.
        found = _advantages(config, _ROWS._replace(anchor=np.arange(6)))
    else:
        found = _advantages(config)
        # The environment's own value may be the flag's.
        is_taken = is_taken and getattr(plain, flag) != value
    assert (not np.allclose(found, _advantages(plain))) == is_taken


def test_an_environment_of_ones_own_has_its_own_profile(monkeypatch):
    words = ["--profile", "rllib_gigpo.agent.profiles.sokoban:profile"]
    config = _config("gym_gigpo", monkeypatch, *words)
    assert config.agent_profile.prompt == sokoban_profile().prompt
    assert _config("gym_gigpo", monkeypatch).agent_profile.prompt != sokoban_profile().prompt


def test_what_is_set_by_hand_holds_for_the_demo_too(monkeypatch):
    module = _module("webshop_gigpo", monkeypatch)
    # More than one GPU would be shared, which a demo without engines must not be.
    given = {"lr": 0.5, "step_threads": 2, "on_long_prompt": "end_episode"}
    # What engines and several learners are told waits for the machine that has them.
    given |= {"weight_sync": "ipc", "offload_to_cpu": True, "use_liger_kernel": True}
    words = ["--smoke", "--set", json.dumps(given), "--engine=vllm", "--gpus-per-engine=0.5"]
    args = module.parser.parse_args(words)
    config = importlib.import_module("_shared").demo_settings(args, module.demo_config)
    config.validate()
    assert (config.lr, config.step_threads) == (0.5, 2)
    assert config.on_long_prompt == "end_episode"
    assert (config.num_groups, config.engine) == (2, "transformers")


def test_a_sweep_takes_other_settings_and_an_agent(monkeypatch):
    module = _module("sweep_gigpo", monkeypatch)
    given = ["--set", '{"max_prompt_tokens":99,"on_long_prompt":"end_episode"}']
    agent = ["--profile", "rllib_gigpo.agent.profiles.sokoban:profile"]
    config = module.sweep_config(module.parse([*given, *agent]))
    config.validate()
    assert (config.max_prompt_tokens, config.on_long_prompt) == (99, "end_episode")
    assert config.agent_profile.prompt == sokoban_profile().prompt
    engines = ["--engine=vllm", "--engine-options", '{"block_size":16}']
    assert module.sweep_config(module.parse(engines)).engine_options["block_size"] == 16
    with pytest.raises(ValueError, match="--set omega: use --omegas, which this example has"):
        module.sweep_config(module.parse(["--set", '{"omega":1}']))


def test_a_sweep_that_cannot_start_claims_no_folder(tmp_path, monkeypatch):
    module = _module("sweep_gigpo", monkeypatch)
    for wrong in ('{"omgea":1}', '{"lr":-1}'):
        with pytest.raises(ValueError, match=r"omgea|lr=-1"):
            module.main([f"--results={tmp_path / 'sweep'}", "--set", wrong])
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(("gpus", "share"), [("0.5", 0.425), ("1", 0.85)])
def test_an_engine_of_a_sweep_takes_its_part_of_a_gpu(gpus, share, monkeypatch):
    module = _module("sweep_gigpo", monkeypatch)
    args = module.parse(
        ["--engine=vllm", f"--gpus-per-engine={gpus}", "--num-gpus-per-learner=0.5"]
    )
    config = module.sweep_config(args)
    config.validate()
    assert config.vllm_settings.gpu_memory_share == share
    assert config.engine_sleep == (gpus == "0.5")


@pytest.mark.parametrize("name", _EVALUATED)
def test_an_evaluation_interval_of_0_evaluates_nothing(name: str, monkeypatch):
    config = _config(name, monkeypatch, "--evaluation-interval=0")
    assert not config.evaluation_interval
    assert not config.evaluation_config
    module = importlib.import_module(name)
    assert _config(name, monkeypatch).evaluation_interval == module.parser.get_default(
        "evaluation_interval"
    )


@pytest.mark.parametrize(
    ("name", "arguments", "threads"),
    [
        ("search_gigpo", "--retriever http://127.0.0.1:1", 64),
        ("search_team_gigpo", "", 64),
        ("appworld_gigpo", "", 16),
        ("gym_gigpo", "--env openenv:http://127.0.0.1:1", 64),
        ("gym_gigpo", "--env mcp:server", 64),
        ("gym_gigpo", "", 0),
        ("sokoban_gigpo", "", 0),
    ],
)
def test_what_waits_for_servers_is_stepped_in_threads(name, arguments, threads, monkeypatch):
    module = _module(name, monkeypatch)
    args = module.parser.parse_args(arguments.split())
    assert module.paper_config(args).step_threads == threads


@pytest.mark.parametrize("name", _TEAMS)
def test_a_team_shares_a_policy(name: str, monkeypatch):
    config = _config(name, monkeypatch, "--policies=shared")
    assert config.module_ids == ("shared",)
    assert config.lora is None


@pytest.mark.parametrize("name", _TEAMS)
def test_a_teams_adapters_have_the_settings_of_lora(name: str, monkeypatch):
    config = _config(name, monkeypatch, "--policies=adapters", "--model=qwen2.5-7b")
    alone = _config("alfworld_gigpo", monkeypatch, "--lora", "--model=qwen2.5-7b")
    for setting in ("lora", "base_dtype", "lr", "kl_coeff"):
        assert getattr(config, setting) == getattr(alone, setting), setting
    assert (config.base_dtype, config.lr, config.kl_coeff) == ("bfloat16", 3e-6, 0.0)
    assert config.module_ids == tuple(sorted(importlib.import_module(name)._AGENTS))


@pytest.mark.parametrize("name", _TEAMS)
@pytest.mark.parametrize("policies", ["adapters", "separate"])
def test_a_frozen_agent_does_not_learn(name: str, policies: str, monkeypatch):
    agents = _module(name, monkeypatch)._AGENTS
    config = _config(name, monkeypatch, f"--policies={policies}", f"--frozen={agents[1]}")
    assert config.policies_to_train == [agents[0]]
    with pytest.raises(ValueError, match=f"--frozen {agents[1]} with --policies shared"):
        _config(name, monkeypatch, "--policies=shared", f"--frozen={agents[1]}")


def test_check_refuses_them_too():
    # `rllib-gigpo check` reads tuned examples by the same way.
    script = str(_FOLDER / "webshop_gigpo.py")
    with pytest.raises(ValueError, match="--num-engines 2 with --engine transformers has no"):
        load_config(script, ["--num-engines=2"])
