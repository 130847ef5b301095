"""The report: what is in the page, and what cannot get into it."""

import http.client
import json
import os
import pickle
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_gigpo.recording.folder import RunFolder, write_bytes, write_lines
from rllib_gigpo.recording.pictures import png
from rllib_gigpo.report import RunServer, report_html, write_report
from rllib_gigpo.report.build import embedded, spread_order
from rllib_gigpo.report.data import open_run, rollout_data
from tests.recorded import RUN, add_iteration, recorded_rows, write_run
from tests.serving import running


def blocks(html: str) -> dict[str, str]:
    """The JSON in a page by the id of its element."""
    found = re.findall(r'<script type="application/json" id="([\w-]+)">(.*?)</script>', html, re.S)
    return dict(found)


class TestPage:
    def test_holds_metrics_and_rollouts(self, tmp_path):
        folder = write_run(tmp_path)
        found = blocks(write_report(tmp_path).read_text())
        data = json.loads(found["data"])
        assert data["run"]["run_id"] == "abc"
        assert [line["iteration"] for line in data["metrics"]] == [1, 2]
        assert data["iterations"] == [1, 2]
        assert data["receipt"]["cost"]["hours_total"] == 2.0
        assert json.loads(found["rollouts-2"]) == rollout_data(folder, 2)

    def test_rows_come_back_from_the_compact_form(self, tmp_path):
        write_run(tmp_path, iterations=1)
        packed = rollout_data(RunFolder(tmp_path), 1)
        back = []
        for cells in packed["rows"]:
            row = dict(zip(packed["fields"], cells, strict=True))
            for name in packed["text_fields"]:
                row[name] = None if row[name] is None else packed["texts"][row[name]]
            back.append(row)
        assert back == recorded_rows().rows
        assert packed["texts"].count("1 2") == 1

    def test_parquet_alone_is_enough(self, tmp_path):
        folder = write_run(tmp_path, iterations=1)
        whole = rollout_data(folder, 1)
        folder.rollout_file(1).unlink()
        assert rollout_data(folder, 1) == whole

    def test_asks_the_network_for_nothing(self, tmp_path):
        write_run(tmp_path, iterations=1)
        html = report_html(RunFolder(tmp_path))
        outside = re.findall(r"https?://[^\s\"'<]+", html)
        assert set(outside) == {"http://www.w3.org/2000/svg"}  # the name of a namespace
        assert "src=" not in html.split("<body>")[0]
        assert "connect-src 'none'" in html

    def test_iterations_that_do_not_fit_are_left_out_evenly(self, tmp_path):
        folder = write_run(tmp_path, iterations=9)
        one = len(embedded(rollout_data(folder, 9)))
        data = json.loads(blocks(report_html(folder, max_mb=5.5 * one / 2**20))["data"])
        assert data["iterations"] == [1, 3, 5, 7, 9]
        assert data["recorded"] == list(range(1, 10))
        least = json.loads(blocks(report_html(folder, max_mb=0))["data"])
        assert least["iterations"] == [9]

    @given(st.integers(0, 40))
    def test_spread_order_keeps_every_item_once(self, count):
        items = list(range(count))
        assert sorted(spread_order(items)) == items
        assert spread_order(items)[:1] == items[-1:]

    def test_pictures_are_inside(self, tmp_path):
        folder = write_run(tmp_path, iterations=0)
        digest, row = "0" * 32, recorded_rows().rows[0]
        content = png(np.zeros((2, 2, 3), np.uint8))
        write_bytes(folder.pictures / f"{digest}.png", content)
        write_lines(folder.rollout_file(1), [{**row, "picture": digest}])
        assert list(rollout_data(folder, 1)["pictures"]) == [digest]

    def test_no_planted_link_is_written_through(self, tmp_path):
        """The report of a stranger's folder goes into it, where any name may be a link."""
        folder = write_run(tmp_path / "run")
        target = tmp_path / "mine"
        target.write_text("mine")
        before = set(folder.path.iterdir())
        names = ["report.html", f".report.html.{os.getpid()}", ".report.html.tmp", ".report.html"]
        for name in names:
            (folder.path / name).symlink_to(target)
        assert write_report(folder.path) == folder.path / "report.html"
        assert target.read_text() == "mine"
        assert {path.name for path in set(folder.path.iterdir()) - before} == set(names)
        assert (folder.path / "report.html").read_text().startswith("<!doctype html>")

    def test_a_picture_name_cannot_leave_the_folder(self, tmp_path):
        folder = write_run(tmp_path / "run", iterations=0)
        (tmp_path / "secret.png").write_bytes(b"secret")
        row = recorded_rows().rows[0]
        names = ["../../secret", "../secret", str(tmp_path / "secret"), "0" * 32 + "/../x"]
        write_lines(folder.rollout_file(1), [{**row, "picture": name} for name in names])
        assert rollout_data(folder, 1)["pictures"] == {}


class TestEmbedding:
    @given(st.text() | st.dictionaries(st.text(), st.text()))
    def test_no_text_can_end_its_element(self, value):
        text = embedded(value)
        assert json.loads(text) == value
        assert not set(text) & set("<>&")
        assert text.isascii()

    def test_markup_in_a_rollout_stays_data(self, tmp_path):
        write_run(tmp_path, iterations=0, run={**RUN, "env": "</script><script>alert(1)</script>"})
        rows = [{**row, "prompt": "%%data%%</script><!--"} for row in recorded_rows().rows]
        write_lines(RunFolder(tmp_path).rollout_file(1), rows)
        html = report_html(RunFolder(tmp_path))
        found = blocks(html)
        assert json.loads(found["data"])["run"]["env"] == "</script><script>alert(1)</script>"
        assert "%%data%%</script><!--" in json.loads(found["rollouts-1"])["texts"]
        # The two JSON elements and the page's own script: nothing else opens one.
        assert html.count("<script") == 3
        assert "<!--" not in html


class TestRunFolder:
    def test_says_which_runs_lie_below(self, tmp_path):
        write_run(tmp_path / "trial_1")
        write_run(tmp_path / "trial_2")
        with pytest.raises(ValueError, match=r"holds 2 runs, choose one:\n.*trial_1\n.*trial_2"):
            open_run(tmp_path)

    def test_a_single_run_below_is_meant(self, tmp_path):
        write_run(tmp_path / "trials" / "GiGPO_1")
        assert open_run(tmp_path).path == tmp_path / "trials" / "GiGPO_1"

    def test_says_what_is_missing(self, tmp_path):
        with pytest.raises(ValueError, match=r"holds no run\.json"):
            open_run(tmp_path)
        with pytest.raises(ValueError, match="is no folder"):
            open_run(tmp_path / "none")

    def test_nothing_is_unpickled(self, tmp_path, monkeypatch):
        folder = write_run(tmp_path)
        for name in ("run.pkl", "rollouts/000003.pkl", "algorithm_state.pkl", "params.pkl"):
            (tmp_path / name).write_bytes(pickle.dumps("harm"))

        def refuse(*args, **kwargs):
            raise AssertionError("something was unpickled")

        monkeypatch.setattr(pickle, "load", refuse)
        monkeypatch.setattr(pickle, "loads", refuse)
        monkeypatch.setattr(pickle, "Unpickler", refuse)
        assert json.loads(blocks(report_html(folder))["data"])["iterations"] == [1, 2]

    def test_a_damaged_file_is_named(self, tmp_path):
        folder = write_run(tmp_path)
        folder.run.write_text("{")
        with pytest.raises(ValueError, match=r"run\.json is not JSON"):
            report_html(folder)


def serving(path, **kwargs):
    return running(RunServer(path, **kwargs))


def ask(server: RunServer, path: str, host: str | None = None, method: str = "GET"):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    connection.endheaders()
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


class TestServer:
    def test_serves_what_is_new(self, tmp_path):
        folder = write_run(tmp_path, iterations=1)
        with serving(tmp_path) as server:
            assert server.server_address[0] == "127.0.0.1"
            status, content = ask(server, "/")
            assert status == 200
            assert b"connect-src 'self'" in content
            assert json.loads(ask(server, "/state")[1])["last"] == 1
            add_iteration(folder, 2)
            assert json.loads(ask(server, "/state")[1]) == {
                "last": 2,
                "evaluations": 0,
                "events": 0,
                "iterations": [1, 2],
            }
            fresh = json.loads(ask(server, "/run?after=1")[1])
            assert [line["iteration"] for line in fresh["metrics"]] == [2]
            assert json.loads(ask(server, "/rollouts/2")[1]) == rollout_data(folder, 2)

    @pytest.mark.parametrize(
        "path",
        [
            "/../secret.txt",
            "/%2e%2e/secret.txt",
            "/..%2fsecret.txt",
            "/rollouts/../../secret.txt",
            "/rollouts/..%5c..%5csecret.txt",
            "/rollouts//etc/passwd",
            "//etc/passwd",
            "/rollouts/1/../../../secret.txt",
            "/rollouts/1%00",
            "/run.json",
            "/rollouts/-1",
            "/rollouts/99",
            "/rollouts/%EF%BC%91",
        ],
    )
    def test_serves_no_other_file(self, path, tmp_path):
        write_run(tmp_path / "run", iterations=1)
        (tmp_path / "secret.txt").write_text("secret")
        with serving(tmp_path / "run") as server:
            status, content = ask(server, path)
        assert status == 404
        assert content == b"there is no such page"

    @pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil", ""])
    def test_refuses_names_that_others_point_here(self, host, tmp_path):
        write_run(tmp_path, iterations=1)
        with serving(tmp_path) as server:
            assert ask(server, "/run", host or " ")[0] == 403
            assert ask(server, "/run", "localhost")[0] == 200

    def test_takes_no_other_method(self, tmp_path):
        write_run(tmp_path, iterations=1)
        with serving(tmp_path) as server:
            assert ask(server, "/run", method="POST")[0] == 501

    def test_a_damaged_file_does_not_stop_it(self, tmp_path):
        folder = write_run(tmp_path, iterations=1)
        folder.rollout_file(1).write_text("{\n")
        with serving(tmp_path) as server:
            status, content = ask(server, "/rollouts/1")
            assert status == 500
            assert b"line 1, is not JSON" in content
            assert ask(server, "/state")[0] == 200
