"""`rllib-gigpo check`: faults are collected, and a sound run takes one real step."""

from pathlib import Path

import pytest
import torch
import transformers

from rllib_gigpo.check.findings import Finding, is_sound
from rllib_gigpo.check.loading import load_config
from rllib_gigpo.check.main import main
from rllib_gigpo.check.memory import adapter_parameters, memory_part
from rllib_gigpo.check.one_step import cut_to_a_step
from rllib_gigpo.check.parts import environment_part, model_part, settings_part
from rllib_gigpo.check.run import check
from rllib_gigpo.check.small_copy import small_copy
from rllib_gigpo.config import GiGPOConfig
from rllib_gigpo.lora import LoRASettings
from rllib_gigpo.memory_estimate import estimate, plan_of
from rllib_gigpo.models import load_causal_lm, load_tokenizer, materialize
from rllib_gigpo.validation import setting_faults
from tests.dial_worlds import ROWS
from tests.tiny_runs import tiny_config


def test_all_faults_are_found_at_once():
    config = tiny_config(gamma=1.5, omega=-1.0, f_norm="sd", kl_estimator="k1", kl_coeff=0.1)
    config.lr = float("nan")
    found = list(setting_faults(config))
    for fault in (
        "gamma=1.5: expected a finite number from 0 to 1",
        "omega=-1.0: expected a finite number of at least 0",
        "f_norm='sd': expected one of 'std', 'none'",
        "lr=nan: expected a finite number of at least 0",
        "kl_estimator='k1' with kl_in='loss'",
    ):
        assert sum(text.startswith(fault) for text in found) == 1, (fault, found)
    assert len(found) == 5
    # Training stops at the first of them.
    with pytest.raises(ValueError, match=r"^f_norm='sd'"):
        config.validate()
    assert [f.state for f in settings_part(config)] == ["FAULT"] * 5


def test_several_faults_of_one_kind_are_found():
    config = tiny_config(num_minibatches=2, max_staleness=3, dual_clip=1.1)
    config.minibatch_size = 4
    found = list(setting_faults(config))
    for fault in ("minibatch_size=4 and num_minibatches=2", "max_staleness=3", "dual_clip=1.1"):
        assert sum(text.startswith(fault) for text in found) == 1, (fault, found)


def test_a_faulty_setting_does_not_break_what_reads_it():
    config = tiny_config(dual_clip=3.0)
    config.clip_param = "wide"
    assert next(iter(setting_faults(config))).startswith("clip_param='wide'")


def test_an_environment_without_its_data_is_a_fault(tmp_path: Path):
    config = tiny_config().environment(
        "Sokoban", env_config={"levels": str(tmp_path / "no-levels.txt")}
    )
    found = environment_part(config)
    assert [finding.state for finding in found] == ["FAULT"]
    assert "no-levels.txt" in found[0].text
    # What does not need the environment is looked at all the same.
    parts = [f.part for f in check(config, one_step=False)]
    assert parts == ["settings", "environment", "model"]


def test_one_task_alone_is_a_note():
    config = tiny_config().environment("tests.broken_envs:OneTask")
    found = {finding.state: finding.text for finding in environment_part(config)}
    assert set(found) == {"note", "ok"}
    assert found["note"].startswith("20 seeds all give the same task")


def test_the_evaluations_own_data_are_looked_for(tmp_path: Path):
    config = (
        tiny_config()
        .environment("Sokoban")
        .evaluation(
            evaluation_interval=1,
            evaluation_config={"env_config": {"levels": str(tmp_path / "no-levels.txt")}},
        )
    )
    states = {finding.part: finding.state for finding in environment_part(config)}
    assert states == {"environment": "ok", "evaluation": "FAULT"}


def test_prompts_over_the_limit_are_a_fault_unless_a_rule_handles_them():
    config = tiny_config().llm(max_prompt_tokens=5)
    found = {finding.part: finding for finding in model_part(config)}
    assert found["model"].state == "ok"
    assert "</action>" in found["model"].text
    assert found["prompts"].state == "FAULT"
    assert "the limit is 5" in found["prompts"].text
    config.agent(on_long_prompt="end_episode")
    assert [f.state for f in model_part(config) if f.part == "prompts"] == ["note"]


def test_a_response_that_cannot_fit_is_a_fault():
    config = tiny_config().llm(max_response_tokens=2)
    texts = [f.text for f in model_part(config) if f.state == "FAULT"]
    assert len(texts) == 1
    assert "max_response_tokens=2: raise it" in texts[0]


def test_actions_that_the_tokenizer_loses_are_a_fault():
    # Words of the tiny model are joined by blanks: `{ " name " : ...` names no tool.
    config = tiny_config(num_groups=1).environment(
        "trl:tests.dial_worlds:DialEnv", env_config={"rows": ROWS, "won_reward": 1.0}
    )
    config.llm(max_prompt_tokens=1024, max_response_tokens=64)
    (fault,) = [finding for finding in model_part(config) if finding.state == "FAULT"]
    assert "possible responses lose their action in the model's tokenizer" in fault.text
    assert '{ " name " :' in fault.text
    # What KeyDoor wants said is words.
    assert all(finding.state == "ok" for finding in model_part(tiny_config()))


def test_a_model_that_is_not_there_is_a_fault(tmp_path: Path):
    config = tiny_config().llm(model=str(tmp_path), options={})
    (found,) = model_part(config)
    assert found.state == "FAULT"
    assert "config.json" in found.text


def test_memory_is_told_by_phase_with_the_setting_to_turn():
    config = tiny_config(kl_coeff=0.1)
    found = list(memory_part(config))
    assert [(f.part, f.state, f.text.split(":")[0]) for f in found] == [
        ("memory", "ok", phase) for phase in ("score", "update", "engine")
    ]
    # 16384 tokens of activations weigh more than a model of some thousand parameters.
    assert "most of it activations" in found[1].text
    assert "activation_checkpointing=True" in found[1].text
    config.learners(activation_checkpointing=True)
    assert "activations" in (told := list(memory_part(config))[1].text)
    assert "activation_checkpointing" not in told
    small = {f.text.split(":")[0]: f for f in memory_part(config, gpu_gib=1e-6)}
    assert {phase: f.state for phase, f in small.items()} == {
        "score": "FAULT",
        "update": "FAULT",
        "engine": "note",
    }
    assert "the GPU has 1e-06" in small["update"].text


def test_an_adapter_is_counted_matrix_by_matrix():
    path = materialize(tiny_config().model_spec)
    # One layer of width 32: q, k, v, o and gate, up, down, all 32 x 32; rank 2 x (32 + 32) each.
    assert adapter_parameters(path, LoRASettings(rank=2)) == 7 * 2 * 64
    assert adapter_parameters(path, LoRASettings(rank=2, targets=("q_proj",))) == 2 * 64


def test_the_small_copy_has_two_layers_and_the_models_own_tokenizer(tmp_path: Path):
    spec = tiny_config().llm(options={"num_layers": 5}).model_spec
    path = materialize(spec)
    folder, parameters = small_copy(path, tmp_path / "copy")
    model = load_causal_lm(str(folder))
    assert model.config.num_hidden_layers == 2
    assert parameters == sum(p.numel() for p in model.parameters())
    text = "<action> left </action>"
    assert load_tokenizer(str(folder))(text).input_ids == load_tokenizer(path)(text).input_ids
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("family", ["LlamaConfig", "Qwen2Config", "Qwen3Config"])
def test_the_copy_of_a_wide_model_is_narrow(family: str, tmp_path: Path):
    settings = {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 120_000,
    }  # fmt: skip
    getattr(transformers, family)(**settings).save_pretrained(tmp_path / "wide")
    load_tokenizer(materialize(tiny_config().model_spec)).save_pretrained(tmp_path / "wide")
    folder, parameters = small_copy(str(tmp_path / "wide"), tmp_path / "copy")
    config = transformers.AutoConfig.from_pretrained(folder)
    assert (config.num_hidden_layers, config.hidden_size) == (2, 128)
    assert (config.vocab_size, config.model_type) == (
        120_000,
        family.removesuffix("Config").lower(),
    )
    # Untied embeddings and output layer, 2 x 120000 x 128, and little else.
    assert 0 < parameters - 2 * 120_000 * 128 * (1 if not config.tie_word_embeddings else 0.5) < 1e6


def test_the_step_keeps_what_is_trained_and_cuts_what_it_costs():
    config = tiny_config(num_groups=16, group_size=8, omega=0.3, f_norm="none")
    config.engines(engine="vllm", num_engines=4).learners(num_learners=2)
    small = cut_to_a_step(config, Path("copy"))
    assert (small.num_groups, small.group_size, small.num_learners) == (2, 2, 0)
    assert (small.engine, small.omega, small.f_norm) == ("transformers", 0.3, "none")
    # The run's own settings are what they were.
    assert (config.num_groups, config.engine, config.num_learners) == (16, "vllm", 2)


def test_configs_are_loaded_by_name(tmp_path: Path):
    file = tmp_path / "a_run_of_mine.py"
    file.write_text(
        "from rllib_gigpo import GiGPOConfig\n"
        "config = GiGPOConfig().environment('KeyDoor').training(omega=0.25)\n"
        "def made():\n    return config\n"
        "number = 3\n"
    )
    for name in ("config", "made"):
        assert load_config(f"{file}:{name}").omega == 0.25
    with pytest.raises(ValueError, match="is a int: expected a GiGPOConfig"):
        load_config(f"{file}:number")
    with pytest.raises(ValueError, match="has no 'other'"):
        load_config(f"{file}:other")
    with pytest.raises(ValueError, match="takes no options"):
        load_config(f"{file}:config", ["--lora"])
    with pytest.raises(ValueError, match="is no tuned example"):
        load_config(str(file))
    with pytest.raises(ValueError, match=r"there is no file 'nowhere\.py'"):
        load_config("nowhere.py:config")


def test_tuned_examples_are_loaded_with_their_options():
    script = Path(__file__).parents[2] / "tuned_examples" / "gym_gigpo.py"
    config = load_config(str(script), ["--algo", "rloo", "--seed", "4"])
    assert (config.estimator, config.seed, config.evaluation_duration) == ("rloo", 4, 64)


def test_a_tuned_example_is_checked_with_its_learners_and_runners():
    script = Path(__file__).parents[2] / "tuned_examples" / "gym_gigpo.py"
    arguments = ["--env=gym:FrozenLake-v1", "--num-learners=8", "--num-env-runners=3"]
    config = load_config(str(script), arguments)
    # As on a machine that has a GPU for every learner.
    assert (config.num_learners, config.num_gpus_per_learner) == (8, 1)
    assert (config.num_env_runners, config.sharding) == (3, "fsdp")
    # What eight share, each holds an eighth of.
    one = load_config(str(script), ["--sharding=replicate"])
    shared, whole = (estimate_of(each)["optimizer"] for each in (config, one))
    assert shared == -(-whole // 8)
    without = load_config(str(script), [*arguments, "--num-gpus-per-learner=0"])
    assert (without.num_gpus_per_learner, without.activation_checkpointing) == (0, False)
    with pytest.raises(ValueError, match="--num-gpus 8 has no effect"):
        load_config(str(script), ["--num-gpus=8"])


def estimate_of(config: GiGPOConfig) -> dict[str, int]:
    shape = transformers.AutoConfig.from_pretrained(materialize(config.model_spec))
    return estimate(shape, plan_of(config))["update"]


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_a_sound_run_takes_one_step():
    told: list[tuple[str, list[Finding]]] = []
    found = check(
        tiny_config(num_groups=8, group_size=4, kl_coeff=0.1),
        told=lambda name, findings: told.append((name, findings)),
    )
    assert is_sound(found), found
    parts = ["settings", "environment", "model", "memory", "one step"]
    assert [name for name, _ in told] == parts
    # 2 groups x 2 episodes of at most 3 steps.
    assert "4 episodes, 12 rows" in found[-1].text


def test_the_command_ends_with_1_and_every_fault(tmp_path: Path, capsys):
    file = tmp_path / "a_wrong_run.py"
    file.write_text(
        "from rllib_gigpo import GiGPOConfig\n"
        "config = GiGPOConfig().environment('KeyDoor').training(omega=-1, gamma=2.0)\n"
    )
    assert main([f"{file}:config"]) == 1
    printed = capsys.readouterr().out
    assert "omega=-1" in printed
    assert "gamma=2.0" in printed
    assert "2 to mend before training" in printed
