"""GiGPOConfig: what is wrong is said in one sentence, and what RLlib offers still works."""

from __future__ import annotations

import math
import pickle
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from ray.rllib.callbacks.callbacks import RLlibCallback

from rllib_gigpo.agent import AgentProfile, ChatTemplate
from rllib_gigpo.config import GiGPOConfig
from rllib_gigpo.correction import RolloutCorrection
from rllib_gigpo.engine_checks import OF_OTHER_SETTINGS
from rllib_gigpo.engines.vllm.settings import VLLMSettings
from rllib_gigpo.registry import register_llm_env
from rllib_gigpo.validation import setting_faults
from tests.fakes import Countdown


def config() -> GiGPOConfig:
    return GiGPOConfig().environment("KeyDoor").llm(model="tiny")


def fault(built: GiGPOConfig) -> str:
    """The one sentence that validation raises."""
    with pytest.raises(ValueError) as error:  # noqa: PT011 - callers check the message
        built.validate()
    message = str(error.value)
    assert "\n" not in message
    return message


# One setting -------------------------------------------------------------------------------------

WHOLE = [
    "num_groups",
    "group_size",
    "num_epochs",
    "micro_batch_tokens",
    "lr_warmup_steps",
    "minibatch_size",
    "num_minibatches",
]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [-1, 1.5, "2", True, math.nan])
def test_what_is_no_whole_number_is_refused(name, value):
    built = config().training(minibatch_size=None).training(**{name: value})
    message = fault(built)
    assert message.startswith(f"{name}={value!r}: expected a whole number of at least ")


@pytest.mark.parametrize(
    "name",
    [
        "gamma",
        "omega",
        "kl_coeff",
        "entropy_coeff",
        "lr",
        "weight_decay",
        "invalid_action_penalty",
        "grad_clip",
        "similarity_threshold",
    ],
)
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "1", True, [0.1]])
def test_what_is_no_finite_number_in_range_is_refused(name, value):
    message = fault(config().training(**{name: value}))
    assert message.startswith(f"{name}={value!r}: expected a finite number ")


@pytest.mark.parametrize(
    ("section", "setting", "expected"),
    [
        ("training", {"f_norm": "mean"}, "'std', 'none'"),
        ("training", {"f_norm": None}, "'std', 'none'"),
        ("training", {"group_mean_over": "rows"}, "'episodes', 'steps'"),
        ("training", {"kl_estimator": "k4"}, "'k1', 'k2', 'k3'"),
        ("training", {"optimizer_name": "adam"}, "'adamw', 'sgd'"),
        ("training", {"penalty_scope": "episode"}, "'return', 'step'"),
        ("training", {"old_logp": "none"}, "'recompute', 'engine'"),
        ("training", {"anchor": "meaning"}, "'exact', 'similarity', 'embedding'"),
        ("training", {"gamma": 1.01}, "from 0 to 1"),
        ("learners", {"sharding": "ddp"}, "'replicate', 'fsdp'"),
        ("learners", {"activation_checkpointing": 1}, "True, False"),
        ("training", {"group_size": 0}, "at least 1"),
        ("training", {"lr_warmup_steps": -1}, "at least 0"),
        ("training", {"grad_clip": 0}, "at least"),
        ("training", {"clip_param": 0}, "above 0"),
        ("training", {"clip_param": 1.0}, "low below 1"),
        ("training", {"clip_param": (1.0, 0.2)}, "low below 1"),
        ("training", {"clip_param": (0.2, 0.2, 0.2)}, "a pair (low, high)"),
        ("training", {"clip_param": (0.2, math.nan)}, "a pair (low, high)"),
        ("training", {"clip_param": "0.2"}, "a number above 0"),
        ("training", {"adam_betas": (0.9, 1.0)}, "from 0 to below 1"),
        ("training", {"adam_betas": 0.9}, "two numbers"),
        ("llm", {"dtype": "float16"}, "'float32', 'bfloat16'"),
        ("llm", {"max_prompt_tokens": 0}, "at least 1"),
        ("llm", {"max_response_tokens": 0}, "at least 1"),
        ("llm", {"max_num_seqs": 0}, "at least 1"),
        ("llm", {"temperature": 0}, "at least 0.001"),
        ("llm", {"eval_temperature": -1}, "at least 0"),
        ("llm", {"top_p": 0}, "to 1"),
        ("llm", {"top_p": 1.1}, "to 1"),
        ("llm", {"top_k": -1}, "at least 0"),
        ("agent", {"on_long_prompt": "cut"}, "'end_episode', 'shorten_observation'"),
        ("agent", {"max_episode_steps": 0}, "at least 1"),
        ("agent", {"profile": "chat"}, "expected an AgentProfile"),
        ("evaluation", {"evaluation_samples_per_task": 0}, "at least 1"),
        ("evaluation", {"evaluation_task_seeds": []}, "a list of whole numbers"),
        ("evaluation", {"evaluation_task_seeds": [3, -1]}, "a list of whole numbers"),
        ("evaluation", {"evaluation_task_seeds": "123"}, "a list of whole numbers"),
        ("debugging", {"seed": -1}, "at least 0"),
        ("debugging", {"seed": "zero"}, "a whole number"),
    ],
)
def test_a_faulty_setting_is_named_with_its_value_and_what_was_expected(section, setting, expected):
    ((name, value),) = setting.items()
    message = fault(getattr(config(), section)(**setting))
    assert message.startswith(f"{name}={value!r}")
    assert expected in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": ""}, "model name '' must be"),
        ({"model": "tiny", "options": {"hidden": 8}}, "unknown tiny model options 'hidden'"),
        ({"model": "a/b", "options": {"hidden_size": 64}}, "leave them out for 'a/b'"),
    ],
)
def test_a_model_that_cannot_be_meant_is_refused_before_anything_is_loaded(options, message):
    assert message in fault(config().llm(**options))


@pytest.mark.parametrize(
    ("section", "setting", "instead"),
    [
        ("training", {"train_batch_size_per_learner": 100}, "num_groups and group_size"),
        ("training", {"train_batch_size": 100}, "num_groups and group_size"),
        ("env_runners", {"num_envs_per_env_runner": 4}, "run at once"),
        ("env_runners", {"rollout_fragment_length": 10}, "played to their end"),
        ("env_runners", {"batch_mode": "truncate_episodes"}, "played to their end"),
        ("evaluation", {"evaluation_duration_unit": "timesteps"}, "counts tasks"),
    ],
)
def test_settings_of_rllib_that_mean_nothing_here_are_refused(section, setting, instead):
    ((name, value),) = setting.items()
    message = fault(getattr(config(), section)(**setting))
    assert message.startswith(f"{name}={value!r} has no effect")
    assert instead in message


@pytest.mark.parametrize("value", [60, 0.5, -1, "long", True, float("nan")])
@pytest.mark.parametrize(
    "name",
    [
        "min_time_s_per_iteration",
        "min_sample_timesteps_per_iteration",
        "min_train_timesteps_per_iteration",
    ],
)
def test_several_updates_in_one_iteration_are_refused(name, value):
    message = fault(config().reporting(**{name: value}))
    assert message.startswith(f"reporting({name}={value!r}): expected None or 0, since")
    assert "would not be recorded; leave it out" in message
    for silent in (None, 0, 0.0):
        config().reporting(**{name: silent}).validate()


# Pairs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            lambda c: c.training(minibatch_size=8, num_minibatches=4),
            ["minibatch_size=8", "num_minibatches=4", "set one of them"],
        ),
        (lambda c: c.llm(top_p=0.9), ["top_p=0.9", "top_p=1"]),
        (lambda c: c.llm(top_k=20), ["top_k=20", "top_k=0"]),
        # Weights of old over engine log-probabilities are 1 there: no token comes back by them.
        (
            lambda c: c.llm(top_p=0.9).training(rollout_correction=RolloutCorrection()),
            ["top_p=0.9", "top_p=1"],
        ),
        (lambda c: c.llm(top_k=1, dtype="bfloat16"), ["top_k=1", "top_k=0"]),
        (
            lambda c: c.training(old_logp="engine").llm(dtype="bfloat16"),
            ["old_logp='engine'", "dtype='bfloat16'", "old_logp='recompute'"],
        ),
        (
            lambda c: c.engines(engine="vllm", engine_options={"num_gpus": 1}),
            ["num_gpus", "setting of its own", "engines(engine_num_gpus=...)"],
        ),
        (
            lambda c: c.engines(engine="vllm", engine_options={"max_num_batched_tokens": 1}),
            ["no option 'max_num_batched_tokens'", "gpu_memory_utilization"],
        ),
        (lambda c: c.training(grad_clip_by="value"), ["grad_clip_by='value'", "'global_norm'"]),
        (lambda c: c.training(group_size=1), ["group_size=1", "at least 2"]),
        (
            lambda c: c.evaluation(
                evaluation_interval=1,
                evaluation_num_env_runners=1,
                evaluation_parallel_to_training=True,
            ),
            ["evaluation_parallel_to_training=True", "set it to False"],
        ),
        (
            lambda c: c.api_stack(
                enable_rl_module_and_learner=False,
                enable_env_runner_and_connector_v2=False,
            ),
            ["api_stack", "new API stack", "leave it on"],
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused_with_the_cure(change, parts):
    message = fault(change(config()))
    for part in parts:
        assert part in message


def test_a_limit_on_minibatches_replaces_the_other_one():
    built = config()
    assert (built.minibatch_size, built.num_minibatches) == (256, None)
    built.training(num_minibatches=4)
    assert (built.minibatch_size, built.num_minibatches) == (None, 4)
    built.training(minibatch_size=32)
    assert (built.minibatch_size, built.num_minibatches) == (32, None)
    built.training(minibatch_size=None)
    assert (built.minibatch_size, built.num_minibatches) == (None, None)
    built.training(omega=0.5)
    assert (built.minibatch_size, built.num_minibatches) == (None, None)
    built.validate()


# Names -------------------------------------------------------------------------------------------


def test_an_unknown_attribute_is_answered_with_the_closest_one():
    built = config()
    with pytest.raises(ValueError, match="GiGPOConfig has no setting 'gama': did you mean 'gamma'"):
        built.gama = 0.9
    with pytest.raises(ValueError, match="has no setting 'zzzzzz': see GiGPOConfig"):
        built.zzzzzz = 1


def test_an_unknown_key_of_a_dict_is_answered_with_the_closest_one():
    with pytest.raises(ValueError, match="has no setting 'omgea': did you mean 'omega'"):
        config().update_from_dict({"omgea": 1.0})
    with pytest.raises(ValueError, match="has no setting 'grop_size': did you mean 'group_size'"):
        GiGPOConfig.from_dict({"env": "KeyDoor", "grop_size": 4})


@pytest.mark.parametrize("section", ["training", "llm", "agent", "evaluation", "stepping"])
def test_an_unknown_argument_is_refused(section):
    with pytest.raises(TypeError, match="unexpected keyword argument 'omgea'"):
        getattr(config(), section)(omgea=1.0)


def test_an_unknown_key_of_evaluations_own_settings_is_refused():
    built = config().evaluation(evaluation_config={"eval_temprature": 1.0})
    with pytest.raises(ValueError, match="did you mean 'eval_temperature'"):
        built.get_evaluation_config_object()


def test_names_that_exist_can_be_set_in_every_way():
    built = config().update_from_dict({"omega": 0.5, "num_env_runners": 2})
    built.gamma = 0.9
    assert (built.omega, built.num_env_runners, built.gamma) == (0.5, 2, 0.9)
    built.validate()


# Environments ------------------------------------------------------------------------------------


def test_an_environment_class_is_refused_with_the_way_to_register_it():
    message = fault(GiGPOConfig().environment(Countdown))
    assert "Countdown" in message
    assert "register_llm_env('MyEnv', MyEnv)" in message


def test_an_unknown_environment_is_answered_with_the_closest_one():
    assert "did you mean 'KeyDoor'?" in fault(GiGPOConfig().environment("KeyDor"))


def test_without_an_environment_its_spec_is_refused():
    for ask in (lambda c: c.env_spec, lambda c: c.agent_profile, lambda c: c.model_spec):
        with pytest.raises(ValueError, match=r"no environment is set: call environment\(name\)"):
            ask(GiGPOConfig().llm(model="tiny"))


def test_validating_takes_over_the_environments_profile():
    own = AgentProfile(ChatTemplate("{observation}"), respond="do <action>{action}</action>")
    register_llm_env("Count", Countdown, profile=own)
    built = GiGPOConfig().environment("Count").llm(model="tiny")
    built.validate()
    assert built.profile is own
    other = AgentProfile(ChatTemplate("{task}"))
    built = GiGPOConfig().environment("Count").llm(model="tiny").agent(profile=other)
    built.validate()
    assert built.profile is other


def test_an_environments_arguments_may_be_of_any_kind():
    register_llm_env("Count", lambda env_config: Countdown(len(env_config["steps"])))
    built = GiGPOConfig().environment("Count", env_config={"steps": [1, {"x": 2}, 3]})
    words = built.llm(model="tiny").model_spec.words
    assert {"left", "3", "2"} <= set(words)
    assert words == built.model_spec.words


def test_the_tiny_model_knows_the_words_of_its_environment():
    spec = config().debugging(seed=3).llm(options={"hidden_size": 32}).model_spec
    assert spec.name == "tiny"
    assert spec.seed == 3
    assert spec.tiny_shape.hidden_size == 32
    assert {"at", "key", "door", "hold"} <= set(spec.words)
    assert config().llm(model="some/folder").model_spec.words == ()


# RLlib's own settings ----------------------------------------------------------------------------


class Callbacks(RLlibCallback):
    pass


def test_every_section_of_rllib_still_works():
    built = (
        GiGPOConfig()
        .environment("KeyDoor", env_config={"size": 3})
        .llm(model="tiny")
        .training(gamma=0.9, lr=1e-3, minibatch_size=64, num_epochs=2, grad_clip=0.5)
        .env_runners(num_env_runners=2, num_cpus_per_env_runner=1)
        .learners(num_learners=2, num_gpus_per_learner=0)
        .evaluation(
            evaluation_interval=5,
            evaluation_duration=32,
            evaluation_num_env_runners=1,
            evaluation_config=GiGPOConfig.overrides(eval_temperature=0.7),
            evaluation_samples_per_task=2,
        )
        .multi_agent(
            policies={"walker", "thinker"},
            policy_mapping_fn=lambda agent, episode, **_: "walker",
            policies_to_train=["walker"],
        )
        .debugging(seed=7, log_level="WARN")
        .reporting(min_time_s_per_iteration=0, metrics_num_episodes_for_smoothing=1)
        .callbacks(Callbacks)
        .checkpointing(export_native_model_files=False)
        .fault_tolerance(restart_failed_env_runners=True, max_num_env_runner_restarts=3)
        .resources(num_cpus_for_main_process=1)
        .framework("torch")
        .experimental(_validate_config=True)
    )
    built.validate()
    assert (built.gamma, built.lr, built.num_epochs, built.grad_clip) == (0.9, 1e-3, 2, 0.5)
    assert built.env_config == {"size": 3}
    assert (built.num_env_runners, built.num_learners) == (2, 2)
    assert built.callbacks_class is Callbacks
    assert built.root_seed == 7
    assert set(built.module_ids) == {"walker", "thinker"}
    assert built.module_of("agent_0") == "walker"
    evaluation = built.get_evaluation_config_object()
    assert evaluation.eval_temperature == 0.7
    assert built.eval_temperature == 0.4
    assert evaluation.in_evaluation
    evaluation.validate()


@pytest.mark.parametrize(
    "copied",
    [
        lambda built: built.copy(copy_frozen=False),
        lambda built: GiGPOConfig.from_dict(built.to_dict()),
        lambda built: pickle.loads(pickle.dumps(built)),
    ],
    ids=["copy", "dict", "pickle"],
)
def test_copies_keep_every_setting_and_stay_checked(copied):
    original = config().training(omega=0.25, num_minibatches=3).llm(max_prompt_tokens=77)
    again: Any = copied(original)
    assert (again.omega, again.num_minibatches, again.minibatch_size) == (0.25, 3, None)
    assert again.max_prompt_tokens == 77
    again.validate()
    with pytest.raises(ValueError, match="did you mean 'omega'"):
        again.omgea = 1
    again.omega = 2.0
    assert original.omega == 0.25


def test_numpys_numbers_are_numbers():
    built = config().training(omega=np.float64(0.5), group_size=np.int64(4), lr=np.float64(1e-3))
    built.debugging(seed=np.int64(3)).validate()


def test_the_defaults_are_valid_and_the_papers():
    built = config()
    built.validate()
    # arXiv 2505.10978, App. E.1
    assert (built.num_groups, built.group_size, built.omega, built.gamma) == (16, 8, 1.0, 0.95)
    assert (built.clip_range, built.kl_coeff, built.lr) == ((0.2, 0.2), 0.01, 1e-6)
    assert built.invalid_action_penalty == 0.1


def test_a_pair_of_clip_bounds_is_low_and_high():
    assert config().training(clip_param=(0.1, 0.3)).clip_range == (0.1, 0.3)
    # Tune's samplers give NumPy numbers.
    for value in (1 / 4, np.float32(0.25), np.float64(0.25)):
        built = config().training(clip_param=value)
        built.validate()
        assert built.clip_range == (0.25, 0.25)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({"sharding": "fsdp"}, "set learners(num_learners=2) or more"),
        ({"sharding": "fsdp", "num_learners": 1}, "one learner has nobody to share"),
        ({"offload_to_cpu": True, "num_learners": 2}, "set sharding='fsdp'"),
        (
            {"offload_to_cpu": True, "num_learners": 2, "sharding": "fsdp"},
            "compute on the CPU, where everything is already",
        ),
        (
            {"num_learners": 2, "num_gpus_per_learner": 0.5},
            "needs a GPU for each of them; set num_gpus_per_learner=1, or num_learners=1",
        ),
        (
            {"num_learners": 4, "num_gpus_per_learner": 0.25, "sharding": "fsdp"},
            "num_gpus_per_learner=0.25 with num_learners=4: NCCL",
        ),
    ],
)
def test_a_model_is_shared_by_learners_that_exist(setting, expected):
    assert expected in fault(config().learners(**setting))


@pytest.mark.parametrize(("learners", "gpus"), [(0, 0.5), (1, 0.5), (2, 0), (2, 1), (2, 2)])
def test_learners_have_gpus_of_their_own_or_none(learners, gpus):
    config().learners(num_learners=learners, num_gpus_per_learner=gpus).validate()


def test_every_field_of_an_engine_is_an_option_or_has_a_setting_of_its_own():
    config = GiGPOConfig().environment("KeyDoor").llm(model="tiny", max_num_seqs=7)
    config.engines(engine="vllm", engine_num_cpus=3).debugging(seed=5)
    plain = config.vllm_settings
    for field in fields(VLLMSettings):
        config.engines(engine_options={field.name: getattr(plain, field.name)})
        fault = next((str(f) for f in setting_faults(config)), None)
        # What the config itself sets differs from the engine's own default here, or may.
        assert (fault is None) == (field.name not in OF_OTHER_SETTINGS), (field.name, fault)


def test_a_relative_run_folder_is_where_the_config_was_made(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "made").mkdir()
    monkeypatch.chdir(tmp_path / "made")
    configs = [
        GiGPOConfig().recording(folder=name) for name in ("runs/a", "~/a", "~no-such-user/a")
    ]
    # As in a trial of Tune, which works elsewhere.
    monkeypatch.chdir(tmp_path)
    assert [config.record_folder for config in configs] == [
        str(tmp_path / "made" / "runs" / "a"),
        "/home/me/a",
        str(tmp_path / "made" / "~no-such-user" / "a"),
    ]
    with pytest.raises(ValueError, match="recording\\(folder=''\\): expected a path"):
        GiGPOConfig().environment("KeyDoor").llm(model="tiny").recording(folder="").validate()
