"""What a tuned example leaves behind, and that its command goes on with it."""

import argparse
import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from rllib_gigpo.recording.folder import read_lines
from rllib_gigpo.report.data import open_run
from rllib_gigpo.trained import find_checkpoint, trained_as
from tests.ray_runs import run_config
from tests.tiny_runs import tiny_config

_FOLDER = Path(__file__).parents[2] / "tuned_examples"


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(_FOLDER))
    return importlib.import_module("_training")


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    monkeypatch.syspath_prepend(str(_FOLDER))
    shared = importlib.import_module("_shared")
    return shared.example_parser(
        "Fragile", iterations=2, best_return=9.0, evaluation_interval=0, tasks=2
    )


def test_checkpoints_are_written_unless_one_says_otherwise(parser: argparse.ArgumentParser):
    args = parser.parse_args([])
    assert (args.checkpoint_freq, args.checkpoint_at_end) == (10, True)
    assert parser.parse_args(["--checkpoint-freq=0"]).checkpoint_freq == 0


def test_a_folder_belongs_to_its_arguments(training, parser, tmp_path: Path):
    def claim(*arguments: str) -> None:
        training.claim(tmp_path / "run", parser.parse_args([*arguments, "--results=ignored"]))

    claim("--omega=1")
    # Nothing was trained yet: a command with a mistake may be mended.
    claim("--omega=0.5")
    trial = tmp_path / "run" / "trials" / "GiGPO_x"
    trial.mkdir(parents=True)
    (trial / "result.json").write_text("{}\n")
    # What is the machine's alone does not matter.
    claim("--omega=0.5", "--num-cpus=3")
    with pytest.raises(ValueError, match=r"holds results with omega=0\.5, not 1\.0: name another"):
        claim("--omega=1")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--output=/tmp/x"], "--output /tmp/x has no effect: leave it out; rollouts are"),
        (["--num-gpus=4"], "--num-gpus 4 has no effect: leave it out; --num-gpus-per-learner"),
        (["--num-envs-per-env-runner=4"], "--num-envs-per-env-runner 4 has no effect"),
        (["--num-agents=2"], "--num-agents 2 has no effect"),
        (["--framework=tf2"], "--framework tf2 has no effect: leave it out; RLlib's new API"),
        (["--evaluation-duration-unit=timesteps"], "--evaluation-duration counts episodes"),
        (["--evaluation-parallel-to-training"], "--evaluation-parallel-to-training has no effect"),
        (["--wandb-key=k"], "--wandb-key k has no effect: leave it out; a command line is seen by"),
        (["--wandb-project=mine"], "the variable WANDB_PROJECT names it"),
        (["--wandb-run-name=mine"], "--wandb-run-name mine has no effect"),
        (["--local-mode"], "--local-mode has no effect"),
        (["--as-release-test"], "--as-test compares with --stop-reward"),
        (["--env=KeyDoor"], "--env KeyDoor, but this example trains on Fragile: leave it out"),
        (["--no-tune", "--stop-reward=1"], "--stop-reward 1.0 with --no-tune, which makes one run"),
        (["--no-tune", "--num-samples=2"], "--num-samples 2 with --no-tune"),
        (["--no-tune", "--stop-timesteps=9"], "--stop-timesteps 9 with --no-tune"),
        (
            ["--evaluation-num-env-runners=1"],
            "--evaluation-num-env-runners 1 with --evaluation-interval 0, which evaluates nothing",
        ),
    ],
)
def test_arguments_without_effect_are_refused(arguments, sentence, training, parser):
    config = tiny_config().environment("Fragile")
    with pytest.raises(ValueError, match=re.escape(sentence)):
        training.check_arguments(parser.parse_args(arguments), config)


def test_arguments_with_an_effect_are_not(training, parser):
    config = tiny_config().environment("Fragile")
    for arguments in (
        [],
        ["--stop-reward=1", "--num-samples=2", "--stop-timesteps=9", "--num-cpus=2"],
        # --as-test compares the best return with it.
        ["--no-tune", "--as-test", "--stop-reward=1"],
        ["--evaluation-num-env-runners=1", "--evaluation-interval=2"],
        ["--trackers", "wandb", "--checkpoint-freq=1"],
    ):
        training.check_arguments(parser.parse_args(arguments), config)


def test_a_run_stops_by_its_return_where_there_is_one(training, parser):
    by_return = "env_runners/episode_return_mean"
    assert training.stop_at(parser.parse_args([]))[by_return] == 9.0
    shared = importlib.import_module("_shared")
    endless = shared.example_parser("Fragile", iterations=2, evaluation_interval=0, tasks=2)
    stop = training.stop_at(endless.parse_args([]))
    assert stop.pop("training_iteration") == 2
    assert list(stop) == ["env_runners/num_env_steps_sampled_lifetime"]
    assert training.stop_at(endless.parse_args(["--stop-reward=0.5"]))[by_return] == 0.5


@pytest.mark.parametrize("more", [[], ["--no-tune"]])
def test_as_test_needs_a_return_to_compare_with(more, training, parser):
    config = tiny_config().environment("Fragile")
    shared = importlib.import_module("_shared")
    endless = shared.example_parser("Fragile", iterations=2, evaluation_interval=0, tasks=2)
    with pytest.raises(ValueError, match=r"^--as-test without --stop-reward: this example has no"):
        training.check_arguments(endless.parse_args(["--as-test", *more]), config)
    told = ["--as-test", "--stop-reward=0.5", *more]
    training.check_arguments(endless.parse_args(told), config)
    training.check_arguments(endless.parse_args(more), config)


@pytest.mark.parametrize(
    ("arguments", "gpus", "expected"),
    [
        # A learner takes a GPU where there is one for each.
        ([], 0, (0, 0)),
        ([], 1, (0, 1)),
        (["--num-learners=2"], 1, (2, 0)),
        (["--num-learners=2"], 2, (2, 1)),
        (["--num-gpus-per-learner=0.5"], 8, (0, 0.5)),
    ],
)
def test_learners_take_the_gpus_that_are_there(arguments, gpus, expected, training, parser):
    config = training.with_arguments(tiny_config(), parser.parse_args(arguments), gpus=gpus)
    assert (config.num_learners, config.num_gpus_per_learner) == expected


@pytest.mark.parametrize(
    ("arguments", "gpus", "expected"),
    [
        # One learner holds the model, several share it; on GPUs activations are computed again.
        ([], 0, ("replicate", False)),
        ([], 1, ("replicate", True)),
        (["--num-learners=1"], 1, ("replicate", True)),
        (["--num-learners=2"], 2, ("fsdp", True)),
        (["--num-learners=2"], 1, ("fsdp", False)),
        (["--num-learners=2", "--sharding=replicate"], 2, ("replicate", True)),
        (["--num-learners=2", "--num-gpus-per-learner=0"], 8, ("fsdp", False)),
    ],
)
def test_learners_share_the_model(arguments, gpus, expected, training, parser):
    config = training.with_arguments(tiny_config(), parser.parse_args(arguments), gpus=gpus)
    assert (config.sharding, config.activation_checkpointing) == expected
    config.validate()


def test_learners_are_not_left_with_the_cpu_beside_engines_on_gpus(training, parser):
    # A cluster whose nodes are still starting.
    config = tiny_config().engines(engine="vllm", engine_num_gpus=1)
    args = parser.parse_args(["--num-learners=2"])
    with pytest.raises(ValueError, match=r"^2 learners beside .* the cluster has 1 GPUs now: wait"):
        training.with_arguments(config, args, gpus=1)
    args = parser.parse_args(["--num-learners=2", "--num-gpus-per-learner=0"])
    assert training.with_arguments(config, args, gpus=1).num_gpus_per_learner == 0
    # vLLM on CPUs.
    config.engines(engine_num_gpus=0)
    args = parser.parse_args(["--num-learners=2"])
    assert training.with_arguments(config, args, gpus=0).num_gpus_per_learner == 0


@pytest.mark.parametrize("name", ["_training", "sweep_gigpo"])
def test_results_that_would_be_lost_with_the_job_are_refused(name, training, parser, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    module = importlib.import_module(name)
    begin = {
        "_training": lambda: module.train(tiny_config(), parser.parse_args(["--results=runs/x"])),
        "sweep_gigpo": lambda: module.main(["--results=runs/x"]),
    }
    with pytest.raises(
        ValueError, match=r"^--results runs/x on a cluster is a folder of the job's"
    ):
        begin[name]()


def test_runners_and_evaluation_follow_rllibs_arguments(training, parser):
    arguments = ["--num-env-runners=3", "--evaluation-interval=5", "--evaluation-duration=7"]
    config = training.with_arguments(tiny_config(), parser.parse_args(arguments), gpus=0)
    found = (config.num_env_runners, config.evaluation_interval, config.evaluation_duration)
    assert found == (3, 5, 7)


@pytest.mark.examples
@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_the_same_command_goes_on(training, parser, warm_model, tmp_path: Path, capsys):
    flag, folder = tmp_path / "flag", tmp_path / "run"
    args = parser.parse_args([f"--results={folder}", "--checkpoint-freq=1", "--verbose=0"])

    def break_after_the_first_iteration(algorithm, result, **_):
        if result["training_iteration"] == 1:
            Path(algorithm.config.env_config["flag"]).write_text("raise")

    def train() -> None:
        config = run_config(warm_model, flag=flag)
        training.train(config.callbacks(on_train_result=break_after_the_first_iteration), args)

    # The environment breaks in the second iteration, once.
    with pytest.raises(Exception, match="the key broke"):
        train()
    told = capsys.readouterr().out
    assert f"rllib-gigpo view {folder}\n" in told
    run = open_run(folder)
    assert [line["iteration"] for line in read_lines(run.metrics)] == [1]

    train()
    told = capsys.readouterr().out
    assert "going on with the run in" in told
    assert f"rllib-gigpo report {folder}\n" in told
    # The same run in the same folder, from the checkpoint of its first iteration.
    assert open_run(folder).path == run.path
    assert [line["iteration"] for line in read_lines(run.metrics)] == [1, 2]
    assert len(json.loads(run.run.read_text())["starts"]) == 2
    checkpoint = find_checkpoint(folder)
    assert checkpoint is not None
    assert trained_as(checkpoint).env == "Fragile"


@pytest.mark.examples
@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_without_tune_there_is_a_run_folder_too(training, parser, tmp_path: Path, capsys):
    args = parser.parse_args([f"--results={tmp_path}", "--no-tune", "--stop-iters=1"])
    training.train(tiny_config(), args)
    assert "1/1 " in capsys.readouterr().out
    assert len(read_lines(open_run(tmp_path).metrics)) == 1
    assert find_checkpoint(tmp_path) == tmp_path / "checkpoint_000001"
