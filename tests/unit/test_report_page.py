"""The report in a real browser: what a reader sees, and what markup of a stranger does not do."""

import threading

import numpy as np
import pytest

from rllib_gigpo.recording.folder import RunFolder, append_line, write_bytes, write_lines
from rllib_gigpo.recording.pictures import png
from rllib_gigpo.report import RunServer, write_report
from tests.browser import Browser, browser
from tests.recorded import RUN, add_iteration, metrics_line, recorded_rows, write_run

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def chromium():
    with browser() as found:
        yield found


@pytest.fixture
def report(chromium, tmp_path) -> Browser:
    write_run(tmp_path)
    append_line(
        RunFolder(tmp_path).evaluations, {"iteration": 2, "env_runners": {"success_rate": 0.75}}
    )
    chromium.logs.clear()
    chromium.requests.clear()
    chromium.open(write_report(tmp_path).as_uri())
    return chromium


def texts(page: Browser, selector: str) -> list[str]:
    return page.js(f"[...document.querySelectorAll({selector!r})].map((e) => e.textContent.trim())")


def chart_texts(page: Browser, title: str) -> str:
    return page.js(
        "[...document.querySelectorAll('.chart')]"
        f".find((e) => e.querySelector('h3').textContent.startsWith({title!r})).textContent"
    )


def click(page: Browser, selector: str, text: str) -> None:
    page.js(
        f"[...document.querySelectorAll({selector!r})]"
        f".find((e) => e.textContent.trim().startsWith({text!r})).click()"
    )


def pick(page: Browser, label: str, text: str) -> None:
    page.js(
        "(() => { const list = [...document.querySelectorAll('#explorer label')]"
        f".find((e) => e.textContent.startsWith({label!r})).querySelector('select');"
        f"list.selectedIndex = [...list.options].findIndex((o) => o.text.startsWith({text!r}));"
        "list.dispatchEvent(new Event('change')); })()"
    )


class TestReport:
    def test_shows_the_key_figures_and_every_curve(self, report):
        tiles = dict(zip(texts(report, ".tile span"), texts(report, ".tile b"), strict=True))
        # 4 an hour for the two hours of two iterations.
        assert tiles["Iterations"] == "2"
        assert tiles["Success, training"] == "50 %"
        assert tiles["Success, evaluation"] == "75 %"
        assert (tiles["Tokens"], tiles["Time"], tiles["Price"]) == ("32", "2.0 h", "8.00")
        drawn = report.js(
            "[...document.querySelectorAll('.chart')].filter((e) => e.querySelector('svg')).map("
            "(e) => e.querySelector('h3').textContent)"
        )
        for title in (
            "Success rate",
            "Sizes of step groups, share of groups (Fig. 5)",
            "Singletons",
            "Advantages",
            "Seconds of an iteration (Fig. 6)",
            "KL",
        ):
            assert any(name.startswith(title) for name in drawn), title
        assert "not recorded" in chart_texts(report, "Entropy")
        assert "GiGPO on KeyDoor" in report.js("document.title")

    def test_is_complete_without_network(self, report):
        assert report.requests[:1] == [report.js("location.href.split('#')[0]")]
        assert all(url.startswith(("file://", "data:")) for url in report.requests)
        assert report.logs == []

    def test_reads_values_with_the_keyboard(self, report):
        report.js("document.querySelector('.chart svg').focus()")
        report.press("ArrowRight")
        reading = texts(report, ".chart .reading")[0]
        assert reading == "iteration 2: training 50 %, evaluation 75 %"
        report.press("ArrowLeft")
        assert texts(report, ".chart .reading")[0] == "iteration 1: training 25 %"

    def test_the_x_axis_can_be_hours(self, report):
        report.js("document.querySelector('#axis').value = 'hours'")
        report.js("document.querySelector('#axis').dispatchEvent(new Event('change'))")
        report.js("document.querySelector('.chart details').open = true")
        report.wait("document.querySelector('.chart details table') !== null")
        assert texts(report, ".chart:first-child details td")[:2] == ["1", "25 %"]
        assert "hours" in chart_texts(report, "Success rate")

    def test_settings_seeds_and_cost_are_there(self, report):
        told = report.js("document.querySelector('#facts-body').textContent")
        for part in ("seed: root", "omega", "python train.py", "rollout", "update", "python"):
            assert part in told


def test_events_stand_above_the_curves(chromium, tmp_path):
    folder = write_run(tmp_path)
    worst = {"group": 1, "member": 0, "return": -0.5, "steps": 3, "invalid_actions": 2}
    event = {
        "kind": "collapse",
        "iteration": 2,
        "message": "90% of the actions are invalid, since iteration 1",
        "worst": [{**worst, "last_response": "<b onclick=alert(1)>go go</b>"}],
    }
    append_line(folder.events, event)
    chromium.open(write_report(tmp_path).as_uri())
    assert texts(chromium, "#events h3") == ["collapse in iteration 2"]
    assert texts(chromium, "#events p") == ["90% of the actions are invalid, since iteration 1"]
    cells = texts(chromium, "#events td")
    assert cells == ["1", "0", "-0.5", "3", "2", "<b onclick=alert(1)>go go</b>"]


def test_without_events_nothing_is_shown(report):
    assert report.js("document.querySelector('#events').hidden") is True


class TestExplorer:
    def test_shows_states_actions_and_steps(self, report):
        pick(report, "Task", "0")
        states = texts(report, ".anchors .state")
        assert states == ["a", "b"]
        assert texts(report, ".anchors button")[0].startswith("2 steps, mean return 0.25")
        click(report, ".anchors button", "2 steps")
        row = texts(report, ".columns .card:nth-child(2) tbody td")
        # Both episodes said "act" at "a": returns 0.5 and 0, whose advantages cancel out.
        assert row[1:5] == ["2", "0.25", "0.000", "0.000"]
        assert texts(report, ".columns .card:nth-child(2) tbody button") == ["0·0", "1·0"]

    def test_opens_an_episode_step_by_step(self, report):
        pick(report, "Task", "0")
        report.js("document.querySelector('[data-open=\"0:1\"]').click()")
        report.wait("document.querySelector('#viewer h3').textContent === 'Episode 0, step 1 of 1'")
        cells = texts(report, "#viewer td")
        facts = dict(zip(cells[::2], cells[1::2], strict=True))
        assert (facts["reward"], facts["return from here"]) == ("1", "1")
        assert (facts["A_E, episode"], facts["A_S, step"], facts["A, used"]) == (
            "+0.500",
            "0.000",
            "+0.500",
        )
        assert facts["weight version"] == "0"
        assert texts(report, "#viewer .prompt") == ["1 2"]
        assert texts(report, "#viewer .response") == ["4 5"]
        assert "the end" in texts(report, "#viewer pre")

    def test_moves_with_the_keyboard(self, report):
        pick(report, "Task", "0")
        report.js("document.querySelector('[data-open=\"0:0\"]').focus()")
        report.press("Enter")
        report.wait("document.activeElement.id === 'viewer'")
        report.press("ArrowRight")
        report.wait(
            "document.querySelector('#viewer h3').textContent.startsWith('Episode 0, step 1')"
        )
        report.press("ArrowLeft")
        report.wait(
            "document.querySelector('#viewer h3').textContent.startsWith('Episode 0, step 0')"
        )
        assert "step=0" in report.js("location.hash")

    def test_every_control_is_reached_by_tab(self, report):
        report.js("document.querySelector('#explorer').focus()")
        reached = []
        for _ in range(40):
            report.press("Tab")
            reached.append(
                report.js("document.activeElement.tagName + document.activeElement.textContent")
            )
        assert any(text.startswith("SELECT") for text in reached)
        assert any(text.startswith("BUTTONepisode 1") for text in reached)
        assert any(text.startswith("BUTTON1 step") for text in reached)
        assert any(text.startswith("BUTTONNext step") for text in reached)

    def test_an_address_opens_its_step(self, report):
        report.open(
            report.js("location.href.split('#')[0]") + "?x#iteration=1&group=0&member=1&step=0"
        )
        assert texts(report, "#viewer h3")[0] == "Episode 1, step 0 of 0"
        assert "−0.750" in texts(report, "#viewer td")

    def test_both_colour_schemes_change_the_page(self, report):
        colour = "getComputedStyle(document.body).backgroundColor"
        report.use_scheme("dark")
        dark = report.js(colour)
        report.use_scheme("light")
        light = report.js(colour)
        report.js("document.querySelector('#theme').click()")
        assert (report.js(colour), light) == (dark, "rgb(246, 245, 242)")
        report.use_scheme("light")


ATTACKS = [
    "</script><script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg onload='window.hit = 1'></svg>",
    "--><script>window.hit = 1</script><!--",
    "javascript:window.hit=1",
    "\u2028window.hit = 1\u2029",
    "<iframe srcdoc='<script>parent.hit = 1</script>'></iframe>",
    "'\"><style>body { display: none }</style><base href='http://evil.example/'>",
    "${window.hit = 1}",
    "<!--<script>",
]


STRANGE = ["", "x" * 300, 0, -1e300, True, None, [], ["a", [1]], {}, {"a": {"b": [None]}}]


def test_pictures_are_drawn(chromium, tmp_path):
    folder = write_run(tmp_path, iterations=1)
    names = ["a" * 32, "b" * 32]
    for name, width in zip(names, (3, 5), strict=True):
        content = png(np.zeros((2, width, 3), np.uint8))
        write_bytes(folder.pictures / f"{name}.png", content)
    shown = {"picture": names[1], "prompt_pictures": " ".join(names), "observation": None}
    write_lines(folder.rollout_file(1), [{**row, **shown} for row in recorded_rows().rows])
    chromium.open(write_report(tmp_path).as_uri())
    widths = "[...document.querySelectorAll('#viewer img')].map((e) => e.naturalWidth)"
    chromium.wait(f"{widths}.join() === '3,5'")
    state = "document.querySelector('.columns img').naturalWidth"
    chromium.wait(f"{state} === 5")


class TestStrangers:
    @pytest.mark.parametrize("attack", ATTACKS)
    def test_markup_is_shown_and_never_run(self, attack, chromium, tmp_path):
        run = {
            **RUN,
            **dict.fromkeys(("env", "algorithm", "model", "run_id", "command"), attack),
            "changed": {attack: attack},
            "seeds": {attack: attack},
            "data": [{"path": attack, "files": attack, "bytes": attack, "sha256": attack}],
        }
        folder = write_run(tmp_path, iterations=0, run=run)
        append_line(
            folder.metrics, metrics_line(1, learners={attack: {"kl": 1.0}}, advantages={attack: {}})
        )
        event = {"iteration": 1, **dict.fromkeys(("kind", "message", "time", "signal"), attack)}
        append_line(folder.events, {**event, "worst": [{"last_response": attack}]})
        texts_of = ("prompt", "response", "action", "task", "observation", "task_id", "agent",
                    "anchor_text", "last_observation", "finish_reason", "module")  # fmt: skip
        rows = [{**row, **dict.fromkeys(texts_of, attack)} for row in recorded_rows().rows]
        write_lines(folder.rollout_file(1), rows)
        chromium.logs.clear()
        chromium.requests.clear()
        chromium.open(write_report(tmp_path).as_uri())
        assert chromium.js("window.hit") is None
        assert chromium.js("document.querySelector('#viewer .prompt').textContent") == attack
        assert chromium.js("document.querySelector('#viewer .response').textContent") == attack
        assert chromium.js("document.querySelectorAll('iframe, base, #explorer svg').length") == 0
        assert len(chromium.requests) == 1
        assert chromium.logs == []

    @pytest.mark.parametrize("strange", STRANGE, ids=repr)
    def test_a_page_of_strange_values_is_a_page(self, strange, chromium, tmp_path):
        run = {**dict.fromkeys(RUN, strange), "run_id": "abc"}
        folder = write_run(tmp_path, iterations=0, run=run)
        line = {**dict.fromkeys(metrics_line(1), strange), "iteration": 1}
        append_line(folder.metrics, line)
        told = dict.fromkeys(("iteration", "kind", "message"), strange)
        append_line(folder.events, {**told, "worst": [strange]})
        append_line(folder.evaluations, {"iteration": strange, "env_runners": strange})
        kept = ("group", "member", "turn", "step", "agent", "module")
        rows = [
            {name: value if name in kept else strange for name, value in row.items()}
            for row in recorded_rows().rows
        ]
        write_lines(folder.rollout_file(1), rows)
        chromium.logs.clear()
        chromium.open(write_report(tmp_path).as_uri())
        assert chromium.js("document.querySelectorAll('#viewer h3').length") > 0
        assert chromium.logs == []

    def test_even_markup_that_got_out_would_not_run(self, report):
        markup = "<img src=x onerror='window.hit = 1'>"
        report.js(f'document.body.insertAdjacentHTML("beforeend", "{markup}")')
        report.js(
            "document.body.append(Object.assign(document.createElement('script'),"
            " { textContent: 'window.hit = 1' }))"
        )
        report.wait("true")
        assert report.js("window.hit") is None
        assert any("Content Security Policy" in log for log in report.logs)


def test_a_live_page_follows_the_run(chromium, tmp_path):
    folder = write_run(tmp_path, iterations=1)
    server = RunServer(tmp_path)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        chromium.open(server.url)
        assert texts(chromium, ".tile b")[0] == "1"
        assert texts(chromium, "#viewer .prompt") == ["1 2"]
        add_iteration(folder, 2)
        chromium.wait("document.querySelector('.tile b').textContent === '2'")
        options = "[...document.querySelectorAll('#explorer select')][0].options.length"
        chromium.wait(f"{options} === 2")
        # The reader keeps what is open.
        assert texts(chromium, "#viewer h3")[0] == "Episode 0, step 0 of 1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
