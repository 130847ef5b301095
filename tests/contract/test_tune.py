"""Ray Tune runs, samples, refuses, and resumes GiGPO."""

from pathlib import Path

import pytest
from ray import tune

from rllib_gigpo import GiGPOConfig
from tests.ray_runs import run_config

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


def tuner_of(param_space, folder: Path, iterations: int = 1, **run) -> tune.Tuner:
    return tune.Tuner(
        "GiGPO",
        param_space=param_space,
        run_config=tune.RunConfig(
            name="sweep",
            storage_path=str(folder),
            stop={"training_iteration": iterations},
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
            verbose=0,
            **run,
        ),
    )


def test_a_sweep_runs_and_goes_on_after_a_failure(warm_model, tmp_path):
    def break_after_the_first_iteration(algorithm, result, **_):
        if result["training_iteration"] == 1 and algorithm.config.omega == 1.0:
            Path(algorithm.config.env_config["flag"]).write_text("raise")

    config = (
        run_config(
            warm_model,
            omega=tune.grid_search([0.0, 1.0]),
            gamma=tune.choice([0.9, 0.99]),
            f_norm=tune.choice(["std", "none"]),
        )
        .evaluation(evaluation_interval=1, evaluation_duration=2)
        .callbacks(on_train_result=break_after_the_first_iteration)
    )
    config.env_config["flag"] = tune.sample_from(
        lambda spec: str(tmp_path / f"flag-{spec.config.omega}")
    )
    results = tuner_of(config, tmp_path, iterations=2).fit()
    assert sorted(r.config["omega"] for r in results) == [0.0, 1.0]
    for result in results:
        assert result.config["gamma"] in (0.9, 0.99)
        assert result.config["f_norm"] in ("std", "none")
        assert result.checkpoint is not None
        assert len(result.metrics["evaluation"]["episodes"]) == 2
    (error,) = results.errors
    assert "environment 'Fragile' raised ZeroDivisionError: the key broke" in str(error)
    done = {r.config["omega"]: r.metrics["training_iteration"] for r in results}
    assert done == {0.0: 2, 1.0: 1}

    again = tune.Tuner.restore(
        str(tmp_path / "sweep"), trainable="GiGPO", param_space=config, resume_errored=True
    ).fit()
    assert not again.errors
    assert [r.metrics["training_iteration"] for r in again] == [2, 2]
    # From the checkpoint of the first iteration, not from the start.
    assert sorted(r.metrics["iterations_since_restore"] for r in again) == [1, 2]
    for result in again:
        found = result.metrics["learners"]["default_policy"]
        assert found["optimizer_steps"] == 4
        assert found["gradient_norm"] > 0.0


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"omega": tune.grid_search([1.0, -1.0])}, "omega=-1.0: expected a finite number"),
        ({"f_norm": tune.choice(["mean"])}, "f_norm='mean': expected one of 'std', 'none'"),
        ({"gamma": tune.uniform(1.5, 2.0)}, r"gamma=1\.\d+: expected a finite number from 0 to 1"),
    ],
)
def test_an_invalid_sample_is_refused_before_it_starts(setting, sentence, warm_model, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        tuner_of(run_config(warm_model, **setting), tmp_path).fit()


def test_a_dict_with_an_unknown_key_is_refused(tmp_path):
    space = {"env": "KeyDoor", "omegga": tune.grid_search([0.0, 1.0])}
    with pytest.raises(ValueError, match="no setting 'omegga': did you mean 'omega'"):
        tuner_of(space, tmp_path).fit()


def test_a_dict_is_a_config():
    space = run_config("tiny", omega=0.5).to_dict()
    config = GiGPOConfig().update_from_dict(space)
    config.validate()
    assert (config.omega, config.env, config.num_groups) == (0.5, "Fragile", 3)
