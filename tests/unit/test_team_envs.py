"""The bundled teams, played by hand."""

from __future__ import annotations

import pytest
from gymnasium.error import ResetNeeded

from envs.arithmetic_team import ArithmeticTeam
from tests.missing import skip_or_fail


def sum_of(observation: str) -> int:
    words = observation.split()
    return int(words[1]) + int(words[3])


class TestArithmetic:
    def start(self, **settings) -> tuple[ArithmeticTeam, str, int]:
        env = ArithmeticTeam(**settings)
        observations, _ = env.reset(seed=5)
        assert list(observations) == ["solver"]
        return env, observations["solver"], sum_of(observations["solver"])

    def test_a_right_answer_that_is_believed_ends_the_episode(self):
        env, question, total = self.start()
        seen, rewards, over, cut, infos = env.step({"solver": str(total)})
        assert seen == {"verifier": question.replace("solve", "check").replace("?", f"{total} ?")}
        assert (rewards, over["__all__"], cut["__all__"]) == ({"solver": 0.0}, False, False)
        assert infos["verifier"]["admissible_actions"] == ["right", "wrong"]
        seen, rewards, over, cut, infos = env.step({"verifier": "right"})
        assert rewards == {"solver": 1.0, "verifier": 1.0}
        assert over == {"solver": True, "verifier": True, "__all__": True}
        assert all(info["won"] and info["is_action_valid"] for info in infos.values())
        with pytest.raises(ResetNeeded):
            env.step({"solver": "1"})

    def test_a_wrong_answer_that_is_found_out_is_tried_again(self):
        env, question, total = self.start()
        env.step({"solver": str(total + 1)})
        seen, rewards, over, _, infos = env.step({"verifier": "wrong"})
        assert seen == {"solver": question.replace("? .", f"? not {total + 1} .")}
        assert (rewards, over["__all__"]) == ({"verifier": 1.0}, False)
        assert infos["solver"]["is_action_valid"] is True
        env.step({"solver": str(total)})
        # The second try was the last: the episode ends whatever the verifier says.
        _, rewards, over, _, infos = env.step({"verifier": "wrong"})
        assert rewards == {"solver": 1.0, "verifier": 0.0}
        assert over["__all__"]
        assert infos["solver"]["won"] is False

    @pytest.mark.parametrize("said", ["", "five", "-1", "1 2", "٣", "²"])
    def test_what_is_no_number_is_invalid(self, said):
        env, *_ = self.start()
        seen, _, _, _, _ = env.step({"solver": said})
        assert "= none ?" in seen["verifier"]
        _, rewards, _, _, infos = env.step({"verifier": "perhaps"})
        assert rewards == {"verifier": 0.0}
        assert infos["solver"]["is_action_valid"] is False

    def test_a_number_of_any_length_is_one(self):
        env, _, total = self.start()
        seen, *_ = env.step({"solver": "9" * 5000})
        assert f"= {'9' * 5000} ?" in seen["verifier"]
        env.step({"verifier": "wrong"})
        seen, *_ = env.step({"solver": f"00{total}"})
        assert f"= {total} ?" in seen["verifier"]
        _, rewards, *_ = env.step({"verifier": "right"})
        assert rewards == {"solver": 1.0, "verifier": 1.0}

    @pytest.mark.parametrize("said", ["0", "000"])
    def test_naught_is_a_number(self, said):
        env, *_ = self.start()
        seen, *_ = env.step({"solver": said})
        assert "= 0 ?" in seen["verifier"]

    def test_the_expert_wins_and_the_turn_is_kept(self):
        env, *_ = self.start(largest=9, tries=1)
        with pytest.raises(ValueError, match=r"turn of solver, got actions of \['verifier'\]"):
            env.step({"verifier": "right"})
        env.step({"solver": env.expert_action()})
        *_, infos = env.step({"verifier": env.expert_action()})
        assert infos["solver"]["won"]
        assert env.horizon == 2

    @pytest.mark.parametrize("settings", [{"largest": 0}, {"tries": 0}])
    def test_arguments_out_of_range_are_refused(self, settings):
        with pytest.raises(ValueError, match="must be at least 1, got"):
            ArithmeticTeam(**settings)


class TestSearch:
    def start(self, **settings):
        try:
            from envs.search_team import SearchTeam

            env = SearchTeam(**settings)
            env._search.retriever.retrieve(["river"], 1)
        except ImportError as error:
            skip_or_fail(str(error))
        observations, infos = env.reset(seed=3)
        assert list(observations) == ["searcher"]
        return env, observations["searcher"], infos["searcher"]

    def test_what_the_searcher_finds_the_answerer_reads(self):
        env, question, info = self.start()
        assert info["task"] == question
        seen, rewards, over, _, infos = env.step({"searcher": env.expert_action()})
        assert list(seen) == ["answerer"]
        assert "1" in seen["answerer"]
        assert infos["answerer"]["task"] == question
        assert (rewards, over["__all__"]) == ({"searcher": 0.0}, False)
        answer = f"<answer>{env._search.golden_answers[0]}</answer>"
        _, rewards, over, cut, infos = env.step({"answerer": answer})
        assert rewards == {"searcher": 1.0, "answerer": 1.0}
        assert (over["__all__"], cut["__all__"]) == (True, False)
        assert infos["searcher"]["won"]
        assert infos["searcher"]["tool_calls"] == 1
        with pytest.raises(ResetNeeded):
            env.step({"searcher": "<search>river</search>"})

    def test_what_the_answerer_lacks_the_searcher_reads(self):
        env, *_ = self.start()
        env.step({"searcher": "<search>river</search>"})
        seen, rewards, over, _, infos = env.step({"answerer": "<search>birth town</search>"})
        assert seen == {"searcher": "Missing: birth town"}
        assert (rewards, over["__all__"]) == ({"answerer": 0.0}, False)
        # It asked its mate, not the search engine.
        assert infos["searcher"]["tool_calls"] == 1
        assert infos["searcher"]["is_action_valid"] is True

    def test_an_answer_of_the_searcher_is_invalid_and_costs_a_turn(self):
        env, question, _ = self.start(horizon=3)
        seen, *_ = env.step({"searcher": "<answer>me</answer>"})
        assert seen == {"answerer": question}
        seen, _, _, _, infos = env.step({"answerer": "nonsense"})
        assert "exactly one <search>query</search>" in seen["searcher"]
        assert infos["searcher"]["is_action_valid"] is False
        # The third action is the last.
        seen, rewards, over, cut, infos = env.step({"searcher": "<search>river</search>"})
        assert (over["__all__"], cut["__all__"]) == (False, True)
        assert rewards == {"searcher": 0.0, "answerer": 0.0}
        assert infos["answerer"]["is_action_valid"] is False

    def test_the_expert_wins(self):
        env, *_ = self.start()
        turn, is_over = "searcher", False
        while not is_over:
            _, rewards, over, _, infos = env.step({turn: env.expert_action()})
            turn = "answerer" if turn == "searcher" else "searcher"
            is_over = over["__all__"]
        assert infos["searcher"]["won"]
        assert rewards == {"searcher": 1.0, "answerer": 1.0}

    def test_each_agent_needs_a_turn(self):
        with pytest.raises(ValueError, match="horizon must be at least 2"):
            self.start(horizon=1)
