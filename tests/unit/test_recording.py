"""The parts of a run folder: rows, files, receipts, and what is kept out of them."""

import json
import os
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_gigpo import AgentProfile, ChatTemplate, GiGPOConfig
from rllib_gigpo.recording.describe import describe_run
from rllib_gigpo.recording.folder import (
    RunFolder,
    append_line,
    read_json,
    read_lines,
    write_bytes,
    write_json,
    write_lines,
)
from rllib_gigpo.recording.pictures import png
from rllib_gigpo.recording.provenance import command, commits, data_of, fingerprint, versions
from rllib_gigpo.recording.receipt import Costs, read_receipt, receipt_of, receipt_text
from rllib_gigpo.recording.rollout_rows import FIELDS, parquet_of, read_rows, rollouts_of
from rllib_gigpo.vision.pictures import Gallery, PlacedPicture
from tests.episodes import Step, solo, team
from tests.full_disk import FullDisk
from tests.recorded import EPISODES, RUN, decode, iteration_of, metrics_line, recorded_rows


class TestRows:
    def test_advantages_stand_beside_what_was_played(self):
        rows = recorded_rows().rows
        assert [(r["group"], r["member"], r["step"]) for r in rows] == [
            (0, 0, 0),
            (0, 0, 1),
            (0, 1, 0),
            (1, 0, 0),
            (1, 1, 0),
        ]
        told = ("step_return", "advantage_episode", "advantage_step", "advantage", "anchor_size")
        assert [[row[name] for name in told] for row in rows] == [
            [0.5, 0.5, 0.25, 0.75, 2],
            [1.0, 0.5, 0.0, 0.5, 1],
            [0.0, -0.5, -0.25, -0.75, 2],
            [0.0, 0.0, 0.0, 0.0, 1],
            [0.0, 0.0, 0.0, 0.0, 1],
        ]

    def test_a_row_tells_the_step(self):
        first, second, third, *_ = recorded_rows().rows
        assert list(first) == list(FIELDS)
        assert (first["prompt"], first["response"], first["action"]) == ("1 2", "3", "act")
        assert (first["prompt_tokens"], second["response_tokens"]) == (2, 2)
        assert (first["observation"], first["anchor_text"]) == ("a", None)
        assert (second["reward"], second["episode_return"], second["engine_logp"]) == (1.0, 1.0, -2)
        assert (first["terminated"], second["terminated"], second["truncated"]) == (
            False,
            True,
            False,
        )
        assert (first["last_observation"], second["last_observation"]) == (None, "the end")
        assert (first["valid"], third["valid"], third["format_valid"]) == (True, False, False)
        assert (third["task_id"], third["task"], third["won"], third["env_seed"]) == (
            "t0",
            "Go.",
            False,
            6,
        )
        assert recorded_rows().rows[3]["won"] is None

    def test_the_first_groups_are_kept(self):
        assert {row["group"] for row in recorded_rows(max_groups=1).rows} == {0}

    def test_a_module_that_is_not_trained_has_no_advantages(self):
        iteration = iteration_of(EPISODES)
        rows = rollouts_of(replace(iteration, advantages={}), decode, None).rows
        assert {row["advantage"] for row in rows} == {None}
        assert {row["step_return"] for row in rows} == {None}

    def test_turns_of_a_team_are_those_of_the_environment(self):
        episode = team(
            0, 0, Step("x", agent="a"), Step("y", agent="b"), Step("z", 1.0, agent="a"), env_seed=1
        )
        rows = rollouts_of(iteration_of([episode]), decode, None).rows
        assert [(r["agent"], r["step"], r["turn"]) for r in rows] == [
            ("a", 0, 0),
            ("a", 1, 2),
            ("b", 0, 1),
        ]

    def test_a_picture_is_kept_once_and_can_be_read(self):
        picture = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
        episode = solo(0, 0, Step("k"), Step("k"), env_seed=1)
        for step in (0, 1):
            episode.infos[step].update(observation=picture, anchor=b"digest")
        rollouts = rollouts_of(iteration_of([episode]), decode, None)
        (digest,) = rollouts.pictures
        assert [row["picture"] for row in rollouts.rows] == [digest, digest]
        assert [row["observation"] for row in rollouts.rows] == [None, None]

    def test_pictures_of_the_prompt_are_named_in_order(self):
        gallery = Gallery()
        first, second = (
            gallery.hang(np.full((1, 1, 3), value, dtype=np.uint8)) for value in (1, 2)
        )
        episode = solo(0, 0, Step("k"), env_seed=1)
        episode.infos[0].update(
            observation={"text": "a room", "image": second.pixels},
            images=(PlacedPicture(first, ((0, 1),)), PlacedPicture(second, ((1, 1),))),
        )
        rollouts = rollouts_of(iteration_of([episode]), decode, None)
        (row,) = rollouts.rows
        assert row["prompt_pictures"] == f"{first.name} {second.name}"
        assert (row["observation"], row["picture"]) == ("a room", second.name)
        assert set(rollouts.pictures) == {first.name, second.name}

    @given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 255))
    def test_png_is_read_back(self, height, width, start):
        import io

        values = (start + 7 * np.arange(height * width * 3)) % 256
        picture = values.astype(np.uint8).reshape(height, width, 3)
        read = matplotlib.image.imread(io.BytesIO(png(picture)), format="png")
        np.testing.assert_array_equal(np.round(255 * read).astype(np.uint8), picture)

    def test_parquet_holds_the_rows_and_the_token_ids(self, tmp_path):
        rollouts = recorded_rows()
        write_bytes(tmp_path / "rows.parquet", parquet_of(rollouts))
        back = read_rows(tmp_path / "rows.parquet")
        assert [row["response_ids"] for row in back] == [[3], [4, 5], [3], [3], [3]]
        assert [row["prompt_ids"] for row in back] == [[1, 2]] * 5
        assert [{name: row[name] for name in FIELDS} for row in back] == rollouts.rows

    def test_half_a_character_survives(self, tmp_path):
        rollouts = rollouts_of(iteration_of(EPISODES), lambda ids: "\ud800<\n", None)
        write_lines(tmp_path / "rows.jsonl", rollouts.rows)
        assert read_lines(tmp_path / "rows.jsonl")[0]["prompt"] == "\ud800<\n"
        write_bytes(tmp_path / "rows.parquet", parquet_of(rollouts))
        assert read_rows(tmp_path / "rows.parquet")[0]["prompt"] == "?<\n"


def test_the_docs_explain_every_field():
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    assert [name for name in FIELDS if f"`{name}`" not in page] == []


class TestFolder:
    def test_a_write_that_fails_keeps_the_old_file(self, tmp_path, monkeypatch):
        path = tmp_path / "run.json"
        write_json(path, {"a": 1})

        def full(fd):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_json(path, {"a": 2})
        assert read_json(path) == {"a": 1}
        assert list(tmp_path.iterdir()) == [path]

    @pytest.mark.parametrize("write", [write_bytes, write_json, write_lines])
    def test_nothing_is_written_through_planted_links(self, write, tmp_path, monkeypatch):
        """Under the name of the file, and under any that its scratch file might be given."""
        target, folder = tmp_path / "target", tmp_path / "run"
        target.write_text("mine")
        folder.mkdir()
        path = folder / "report.html"
        path.symlink_to(target)
        (folder / f".report.html.{os.getpid()}").symlink_to(target)
        content = {write_bytes: b"x", write_json: {}, write_lines: [{}]}[write]
        write(path, content)
        assert not path.is_symlink()
        assert target.read_text() == "mine"
        monkeypatch.setattr("secrets.token_hex", lambda size: "0")
        (folder / ".report.html.partial-0").symlink_to(target)
        with pytest.raises(FileExistsError):
            write(path, content)
        assert target.read_text() == "mine"

    def test_scratch_names_cannot_be_foretold(self, tmp_path, monkeypatch):
        seen = []

        def refuse(fd):
            seen.extend(path.name for path in tmp_path.iterdir())
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", refuse)
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                write_bytes(tmp_path / "run.json", b"x")
        assert len(set(seen)) == 3
        assert list(tmp_path.iterdir()) == []

    def test_a_line_that_was_cut_off_is_left_out(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        append_line(path, {"iteration": 1})
        append_line(path, {"iteration": 2})
        path.write_bytes(path.read_bytes()[:-3])
        assert read_lines(path) == [{"iteration": 1}]

    @pytest.mark.parametrize("line", ["{", "[1]", '{"a": NaN}'])
    def test_a_damaged_line_is_named(self, line, tmp_path):
        path = tmp_path / "metrics.jsonl"
        path.write_text(f'{{"iteration": 1}}\n{line}\n')
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
            read_lines(path)

    def test_going_back_lays_later_iterations_aside(self, tmp_path):
        folder = RunFolder(tmp_path)
        for number in (1, 2, 3):
            append_line(folder.metrics, {"iteration": number})
            write_lines(folder.rollout_file(number), [])
        append_line(folder.evaluations, {"iteration": 3})
        folder.cut(1)
        assert read_lines(folder.metrics) == [{"iteration": 1}]
        assert read_lines(folder.evaluations) == []
        assert folder.recorded_iterations() == [1]
        aside = tmp_path / "superseded" / "1"
        assert read_lines(aside / "metrics.jsonl") == [{"iteration": 2}, {"iteration": 3}]
        assert sorted(path.name for path in aside.glob("0*")) == ["000002.jsonl", "000003.jsonl"]
        folder.cut(1)
        assert [path.name for path in (tmp_path / "superseded").iterdir()] == ["1"]

    def test_clearing_leaves_other_files_alone(self, tmp_path):
        folder = RunFolder(tmp_path)
        write_json(folder.run, {})
        write_lines(folder.rollout_file(1), [])
        (tmp_path / "mine.txt").write_text("kept")
        folder.clear()
        assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


class TestProvenance:
    def test_content_and_names_change_the_fingerprint(self, tmp_path):
        folder = tmp_path / "games"
        folder.mkdir()
        (folder / "a.txt").write_text("one")
        first = fingerprint(folder)
        assert (first["files"], first["bytes"]) == (1, 3)
        (folder / "a.txt").write_text("two")
        second = fingerprint(folder)
        (folder / "a.txt").rename(folder / "b.txt")
        assert len({first["sha256"], second["sha256"], fingerprint(folder)["sha256"]}) == 3

    def test_settings_name_the_data(self, tmp_path):
        (tmp_path / "games").mkdir()
        (tmp_path / "model").mkdir()
        config = {"split": "train", "paths": [str(tmp_path / "games"), str(tmp_path / "none")]}
        found = data_of("KeyDoor", config, str(tmp_path / "model"))
        assert [data["path"] for data in found] == [
            str(tmp_path / "games"),
            str(tmp_path / "model"),
        ]
        assert data_of("KeyDoor", {}, "tiny") == []

    def test_variables_of_the_environment_name_data(self, tmp_path, monkeypatch):
        monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
        monkeypatch.setenv("ALF_DATA", str(tmp_path / "other"))
        assert [data["path"] for data in data_of("ALFWorldTeam", {}, "tiny")] == [str(tmp_path)]
        assert data_of("WebShop", {}, "tiny") == []

    def test_versions_and_commits(self):
        found = versions()
        assert found["numpy"] == np.__version__
        assert set(commits()) <= {"package", "working_folder"}

    def test_the_environments_own_profile_is_no_choice_of_the_run(self):
        config = GiGPOConfig().environment("KeyDoor")
        config.agent(profile=config.agent_profile)
        assert "profile" not in describe_run(config, "x")["changed"]
        config.agent(profile=AgentProfile(ChatTemplate("{observation}?")))
        assert "?" in describe_run(config, "x")["changed"]["profile"]["prompt"]["user"]

    def test_a_worker_of_ray_has_no_command(self, monkeypatch):
        import sys
        import types

        main = types.ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", main)
        main.__file__ = "/x/ray/_private/workers/default_worker.py"
        assert command() is None
        main.__file__ = str(Path.cwd() / "train.py")
        monkeypatch.setattr(sys, "argv", ["train.py", "--name", "two words"])
        assert command() == "python train.py --name 'two words'"
        main.__spec__ = types.SimpleNamespace(name="package.tool.__main__")
        assert command() == "python -m package.tool --name 'two words'"


class TestReceipt:
    def test_adds_up_what_the_run_cost(self):
        # Two hours in all: each hour half rollout, a quarter update, and a quarter of neither;
        # "learn" spans other phases and is not counted. 4.0 an hour.
        receipt = receipt_of(RUN, Costs.of([metrics_line(1), metrics_line(2)]))
        assert receipt["cost"] == {
            "hours": {"rollout": 1.0, "update": 0.5, "other": 0.5},
            "hours_total": 2.0,
            "tokens": {"prompt": 20, "response": 12},
            "env_steps": 10,
            "episodes": 8,
            "price_per_hour": 4.0,
            "price": 8.0,
        }
        assert receipt["result"]["success_rate"] == 0.5
        assert receipt["run"]["iterations"] == 2
        assert receipt["repeat"] == "python train.py"

    def test_a_long_run_holds_no_more_than_a_short_one(self):
        short, long = (Costs.of(map(metrics_line, range(1, n + 1))) for n in (10, 500))
        assert (short.iterations, long.iterations) == (10, 500)
        # Five environment steps in each iteration.
        assert (short.env_steps, long.env_steps) == (50, 2500)
        # Numbers have more digits, nothing else is added.
        assert len(json.dumps(vars(long))) < len(json.dumps(vars(short))) + 100

    def test_a_commit_is_named_once(self):
        def told(**commits: str) -> list[str]:
            text = receipt_text(receipt_of({**RUN, "commits": commits}, Costs.of([])))
            return [line for line in text.splitlines() if "commit" in line]

        same = told(package="abc", working_folder="abc")
        assert same == ["- commit of the package and the working folder: `abc`"]
        other = told(package="abc", working_folder="def")
        assert other == ["- commit of the package: `abc`", "- commit of the working folder: `def`"]

    def test_tells_it_in_words(self):
        text = receipt_text(receipt_of(RUN, Costs.of([metrics_line(1)])))
        for part in ("seed: root 3", "omega = `0.5`", "    python train.py", "price: 4.00 at 4.0"):
            assert part in text

    def test_a_run_that_has_just_begun_has_one(self, tmp_path):
        write_json(RunFolder(tmp_path).run, {"run_id": "x"})
        receipt = read_receipt(tmp_path)
        assert receipt["cost"]["hours_total"] == 0
        assert receipt["cost"]["price"] is None
        assert "no command is known" in receipt_text(receipt)
        json.dumps(receipt, allow_nan=False)


def test_half_a_line_of_a_killed_process_is_cut_off_before_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_line(path, {"iteration": 1, "text": "x" * 10_000})
    with path.open("ab") as file:
        file.write(b'{"iteration": 2, "text": "' + b"y" * 10_000)
    append_line(path, {"iteration": 2})
    assert [line["iteration"] for line in read_lines(path)] == [1, 2]
    path.write_bytes(b'{"iteration"')
    append_line(path, {"iteration": 1})
    assert read_lines(path) == [{"iteration": 1}]


def test_a_full_disk_takes_no_half_line(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    append_line(path, {"iteration": 1})

    room = path.stat().st_size + 4

    def open_full(*arguments, **options):
        return FullDisk(open(*arguments, **options), room)

    monkeypatch.setattr("rllib_gigpo.recording.folder.open", open_full, raising=False)
    with pytest.raises(OSError, match="No space left on device"):
        append_line(path, {"iteration": 2})
    monkeypatch.undo()
    assert read_lines(path) == [{"iteration": 1}]
