"""Training runs leave a folder that explains itself, and go on in it when they are resumed."""

import logging
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from ray import tune

from rllib_gigpo import GiGPO, registry
from rllib_gigpo.models import load_tokenizer, materialize
from rllib_gigpo.recording.folder import RunFolder, read_json, read_lines
from rllib_gigpo.recording.rollout_rows import read_rows
from rllib_gigpo.report import report_html
from rllib_gigpo.rows import modules_of
from tests.ray_runs import run_config
from tests.tiny_runs import SHAPE, tiny_config

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


class Keeper(GiGPO):
    """Keeps the rows of every iteration."""

    def _update(self, batch):
        self.rows = [*getattr(self, "rows", []), dict(modules_of(batch))]
        super()._update(batch)


class Notes:
    """A tracker that keeps what it is told."""

    kept: list  # of all objects

    def __init__(self, run, folder):
        self.run_id, self.numbers, self.finished = run["run_id"], {}, 0
        Notes.kept.append(self)

    def log(self, iteration, numbers):
        self.numbers[iteration] = numbers

    def finish(self):
        self.finished += 1


@pytest.fixture(autouse=True)
def no_notes():
    Notes.kept = []


@pytest.fixture(scope="module")
def trained(local_ray, warm_model, tmp_path_factory):
    """Two iterations of a run whose settings and environment hold secrets, and an evaluation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOME_SERVICE_TOKEN", "never-to-be-written")
        folder = tmp_path_factory.mktemp("runs") / "one"
        config = run_config(warm_model).recording(folder=str(folder), price_per_hour=3.0)
        config.env_config["flag"] = "https://me:pass-phrase@host/never-to-be-written"
        config.evaluation(evaluation_duration=2)
        algorithm = Keeper(config=config)
        algorithm.evaluate()
        for _ in range(2):
            algorithm.train()
        learner = algorithm.learner_group._learner
        algorithm.stop()
    return RunFolder(folder), algorithm, learner


class TestFolder:
    def test_every_row_of_every_iteration_is_there(self, trained):
        folder, algorithm, _ = trained
        assert folder.recorded_iterations() == [1, 2]
        for number, batch in enumerate(algorithm.rows, start=1):
            rows = read_lines(folder.rollout_file(number))
            columns = batch["default_policy"]
            assert len(rows) == len(columns["step"])
            for name in ("group", "step", "anchor", "reward", "valid", "weight_version"):
                assert [row[name] for row in rows] == columns[name].tolist()
            assert {row["weight_version"] for row in rows} == {number - 1}

    def test_advantages_are_those_that_were_learned_from(self, trained):
        folder, _, learner = trained
        rows = read_lines(folder.rollout_file(2))
        used = learner.advantages["default_policy"]
        fields = {
            "advantage": "total",
            "advantage_episode": "episode",
            "advantage_step": "step",
            "step_return": "step_return",
        }
        for name, field in fields.items():
            np.testing.assert_array_equal([row[name] for row in rows], getattr(used, field))
        assert any(row["advantage"] != 0 for row in rows)

    def test_texts_are_those_of_the_tokens(self, trained):
        folder, algorithm, _ = trained
        tokenizer = load_tokenizer(materialize(algorithm.config.model_spec))
        for row in read_rows(folder.rollout_file(1, "parquet")):
            assert tokenizer.decode(row["prompt_ids"]) == row["prompt"]
            assert tokenizer.decode(row["response_ids"]) == row["response"]
            assert row["observation"] in row["prompt"]

    def test_metrics_and_evaluations_are_lines(self, trained):
        folder, _, _ = trained
        lines = read_lines(folder.metrics)
        assert [line["iteration"] for line in lines] == [1, 2]
        for line in lines:
            assert line["env_runners"]["num_episodes"] == 9
            assert line["timers"]["rollout"] < line["seconds"]
            rows = read_lines(folder.rollout_file(line["iteration"]))
            sizes = [abs(row["advantage_episode"]) for row in rows]
            assert line["advantages"]["default_policy"]["episode_mean_abs"] == pytest.approx(
                np.mean(sizes)
            )
        (evaluation,) = read_lines(folder.evaluations)
        assert evaluation["iteration"] == 0
        assert len(evaluation["episodes"]) == 2

    def test_settings_and_receipt_tell_what_it_was(self, trained):
        folder, algorithm, _ = trained
        run, receipt = read_json(folder.run), read_json(folder.receipt)
        assert (run["env"], run["seeds"]) == ("Fragile", {"root": 7})
        assert run["changed"]["group_size"] == 3
        assert "omega" not in run["changed"]
        assert run["settings"]["omega"] == 1.0
        assert [data["path"] for data in run["data"]] == [algorithm.config.llm_model]
        tokens = sum(
            line["env_runners"]["num_prompt_tokens"] for line in read_lines(folder.metrics)
        )
        assert receipt["cost"]["tokens"]["prompt"] == tokens
        assert receipt["cost"]["price"] == pytest.approx(
            3.0 * receipt["cost"]["hours_total"], abs=1e-3
        )
        assert receipt["repeat"] == run["command"]
        assert "## How to repeat it" in folder.receipt_text.read_text()

    def test_secrets_are_nowhere(self, trained):
        folder, _, _ = trained
        for path in folder.path.rglob("*"):
            if path.is_file():
                assert b"never-to-be-written" not in path.read_bytes(), path
                assert b"pass-phrase" not in path.read_bytes(), path
        assert read_json(folder.run)["env_config"]["flag"] == "https://***@host/***"

    def test_a_report_shows_it(self, trained):
        folder, _, _ = trained
        assert '"id":"rollouts' not in report_html(folder)
        assert 'id="rollouts-2"' in report_html(folder)


class TestResume:
    def test_goes_on_in_its_folder_under_its_id(self, warm_model, tmp_path):
        config = run_config(warm_model).recording(
            folder=str(tmp_path / "run"), groups=1, every=2, trackers=[Notes]
        )
        folder = RunFolder(tmp_path / "run")
        algorithm = config.build_algo()
        algorithm.train()
        algorithm.train()
        checkpoint = algorithm.save_to_path(str(tmp_path / "checkpoint"))
        for _ in range(2):
            algorithm.train()
        algorithm.stop()
        assert folder.recorded_iterations() == [1, 3]
        first = read_lines(folder.metrics)
        assert {row["group"] for row in read_lines(folder.rollout_file(3))} == {0}

        again = GiGPO.from_checkpoint(checkpoint)
        before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
        again.evaluate()
        after = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
        assert after == before  # a checkpoint that is only evaluated leaves the folder alone
        again.train()
        again.stop()
        lines = read_lines(folder.metrics)
        assert [line["iteration"] for line in lines] == [1, 2, 3]
        assert lines[:2] == first[:2]
        assert lines[2]["env_runners"] == first[2]["env_runners"]
        aside = read_lines(folder.path / "superseded" / "1" / "metrics.jsonl")
        assert [line["iteration"] for line in aside] == [3, 4]
        run = read_json(folder.run)
        assert [start["after_iteration"] for start in run["starts"]] == [0, 2]
        assert [notes.run_id for notes in Notes.kept] == [run["run_id"]] * 2
        assert [sorted(notes.numbers) for notes in Notes.kept] == [[1, 2, 3, 4], [3]]
        assert [notes.finished for notes in Notes.kept] == [1, 1]
        assert Notes.kept[0].numbers[1]["env_runners/num_episodes"] == 9

    def test_turns_back_where_a_checkpoint_is_restored_in_place(self, warm_model, tmp_path):
        config = run_config(warm_model).recording(folder=str(tmp_path / "run"))
        algorithm = config.build_algo()
        algorithm.train()
        checkpoint = algorithm.save_to_path(str(tmp_path / "checkpoint"))
        algorithm.train()
        algorithm.restore_from_path(checkpoint)
        algorithm.train()
        algorithm.stop()
        folder = RunFolder(tmp_path / "run")
        assert [line["iteration"] for line in read_lines(folder.metrics)] == [1, 2]
        assert folder.recorded_iterations() == [1, 2]
        starts = read_json(folder.run)["starts"]
        assert [start["after_iteration"] for start in starts] == [0, 1]

    def test_a_new_run_does_not_write_over_another(self, warm_model, tmp_path):
        config = run_config(warm_model).recording(folder=str(tmp_path))
        algorithm = config.build_algo()
        algorithm.train()
        algorithm.stop()
        other = config.copy(copy_frozen=False).build_algo()
        with pytest.raises(ValueError, match=r"holds 1 iterations of run .* another recording"):
            other.train()
        other.stop()
        assert len(read_lines(RunFolder(tmp_path).metrics)) == 1


def test_a_full_disk_stops_no_training(warm_model, tmp_path, monkeypatch, caplog):
    def full(*args):
        raise OSError(28, "No space left on device")

    algorithm = run_config(warm_model).recording(folder=str(tmp_path)).build_algo()
    algorithm.train()
    monkeypatch.setattr("rllib_gigpo.recording.recorder.append_line", full)
    monkeypatch.setattr("rllib_gigpo.recording.recorder.write_rollouts", full)
    with caplog.at_level(logging.ERROR):
        result = algorithm.train()
        algorithm.recorder.flush()
    monkeypatch.undo()
    assert result["env_runners"]["num_episodes"] == 9
    assert algorithm.recorder.failures == 2
    assert "could not be written: [Errno 28] No space left" in caplog.text
    algorithm.train()
    algorithm.stop()
    assert [line["iteration"] for line in read_lines(RunFolder(tmp_path).metrics)] == [1, 3]
    assert RunFolder(tmp_path).recorded_iterations() == [1, 3]


def test_only_the_main_thread_registers(tmp_path, monkeypatch):
    # Ray's registry has no lock: another thread's entry in between ends an iteration.
    threads = set()
    announce = registry._announce

    def watched(spec):
        threads.add(threading.current_thread())
        announce(spec)

    monkeypatch.setattr(registry, "_announce", watched)
    algorithm = tiny_config().recording(folder=str(tmp_path / "run")).build_algo()
    algorithm.train()
    algorithm.stop()
    assert read_lines(RunFolder(tmp_path / "run").rollout_file(1))
    assert threads == {threading.main_thread()}


def test_a_team_of_two_policies_is_recorded(tmp_path):
    config = (
        tiny_config(num_groups=1, group_size=2)
        .environment("KeyDoorTeam", env_config={"size": 3, "horizon": 4})
        .llm(model="tiny", options=SHAPE)
        .multi_agent(
            policies={"a", "b"}, policy_mapping_fn=lambda agent, *_, **__: "ab"[int(agent[-1])]
        )
        .recording(folder=str(tmp_path))
    )
    algorithm = config.build_algo()
    algorithm.train()
    algorithm.stop()
    rows = read_lines(RunFolder(tmp_path).rollout_file(1))
    assert {(row["agent"], row["module"]) for row in rows} == {("agent_0", "a"), ("agent_1", "b")}
    for agent in ("agent_0", "agent_1"):
        turns = [r["turn"] for r in rows if r["agent"] == agent and r["member"] == 0]
        assert turns == sorted(set(turns))
    assert all(row["advantage"] is not None for row in rows)


def test_the_example_of_the_docs_runs(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    (code,) = re.findall(r"<!-- run: train -->\n```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert (tmp_path / "runs" / "first" / "report.html").exists()


def test_recording_can_be_turned_off(warm_model, tmp_path):
    config = run_config(warm_model).recording(enabled=False, folder=str(tmp_path / "run"))
    algorithm = config.build_algo()
    algorithm.train()
    algorithm.stop()
    assert not (tmp_path / "run").exists()


def test_a_trial_of_tune_leaves_a_run(warm_model, tmp_path):
    config = run_config(warm_model, omega=tune.grid_search([0.5]))
    tuner = tune.Tuner(
        "GiGPO",
        param_space=config,
        run_config=tune.RunConfig(
            name="sweep", storage_path=str(tmp_path), stop={"training_iteration": 1}, verbose=0
        ),
    )
    (result,) = tuner.fit()
    folder = RunFolder(Path(result.path))
    run = read_json(folder.run)
    assert run["settings"]["omega"] == 0.5
    assert run["command"] == config.record_command
    assert folder.recorded_iterations() == [1]
    assert read_json(folder.receipt)["run"]["iterations"] == 1
    assert list(folder.path.glob("events.out.tfevents.*"))  # TensorBoard's, from Tune
