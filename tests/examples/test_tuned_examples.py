"""Every tuned example has a header that says what to expect, the paper's settings, and runs."""

import importlib
import math
import random
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rllib_gigpo.games import Game
from rllib_gigpo.presets import PRESETS
from rllib_gigpo.scripted import expert, play_episode

_FOLDER = Path(__file__).parents[2] / "tuned_examples"
_SCRIPTS = sorted(p.name for p in _FOLDER.glob("*.py") if not p.name.startswith("_"))
# These train through `_shared.run_example`; the others have a test of their own.
_TRAINERS = [name for name in _SCRIPTS if not name.startswith("sweep")]
# Those that every environment is smoke-run with in turn.
_ROTATION = ("gigpo", "grpo", "rloo", "ppo", "dapo", "gigpo_dynamic")


def _module(script: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(_FOLDER))
    return importlib.import_module(script.removesuffix(".py"))


def _paper(module: ModuleType, *arguments: str):
    args = getattr(module, "parse", module.parser.parse_args)(list(arguments))
    config = module.paper_config(args).evaluation(evaluation_interval=args.evaluation_interval)
    config.validate()
    return config


def test_there_are_examples():
    assert {"alfworld_gigpo.py", "search_gigpo.py", "webshop_gigpo.py"} <= set(_SCRIPTS)
    assert {"appworld_gigpo.py", "cards_gigpo.py", "sokoban_gigpo.py"} <= set(_SCRIPTS)
    assert {"gym_gigpo.py", "sweep_gigpo.py"} <= set(_SCRIPTS)


@pytest.mark.parametrize("script", _SCRIPTS)
def test_header_states_command_hardware_and_result(script: str):
    header = (_FOLDER / script).read_text().split('"""')[1]
    for needed in ("How to run this script", f"tuned_examples/{script}", "Hardware", "Results to"):
        assert needed in header, f"{script}: the header lacks {needed!r}"


# The paper's App. E.1 and the authors' scripts. Per script: groups, episodes per group, steps of an
# episode, prompt tokens, rows per optimizer step, F_norm, KL, penalty, temperature of evaluation.
_PAPER = {
    "alfworld_gigpo.py": (16, 8, 50, 2048, 256, "std", 0.01, 0.1, 0.4),
    "webshop_gigpo.py": (16, 8, 15, 4096, 64, "none", 0.01, 0.1, 0.4),
    "search_gigpo.py": (256, 5, 4, 4096, 512, "std", 0.001, 0.01, 0.0),
    "sokoban_gigpo.py": (32, 8, 15, 1024, 64, "none", 0.01, 0.1, 0.4),
    "cards_gigpo.py": (16, 8, 8, 1024, 128, "none", 0.01, 0.1, 0.4),
}


@pytest.mark.parametrize("script", _PAPER)
def test_defaults_are_the_papers(script: str, monkeypatch: pytest.MonkeyPatch):
    config = _paper(_module(script, monkeypatch))
    found = (
        config.num_groups,
        config.group_size,
        config.env_config["horizon"],
        config.max_prompt_tokens,
        config.minibatch_size,
        config.f_norm,
        config.kl_coeff,
        config.invalid_action_penalty,
        config.eval_temperature,
    )
    assert found == _PAPER[script]
    assert (config.omega, config.gamma, config.lr, config.critic_lr) == (1.0, 0.95, 1e-6, 1e-5)
    assert (config.max_response_tokens, config.temperature) == (512, 1.0)
    assert (config.clip_param, config.kl_estimator, config.num_epochs) == (0.2, "k3", 1)


def test_a_won_game_pays_10_and_a_lost_one_0():
    # The paper's reward in ALFWorld, on a game that ships.
    from envs.catalog import make

    env = make("ALFWorld", games="shipped")
    env.reset(seed=0)
    rewards, done = [], False
    while not done:
        _, reward, terminated, truncated, _ = env.step(env.unwrapped.expert_action())  # pyright: ignore
        rewards.append(float(reward))
        done = terminated or truncated
    assert rewards == [0.0] * (len(rewards) - 1) + [10.0]


def _wrong_at_first(env, observation, info, rng) -> str:
    # A verifier has one more true verdict to give where the first answer is wrong.
    return "none" if re.fullmatch(r"solve [^?]* \? \.", observation) else env.expert_action()


# What pays more than the expert, who wins as fast as it can.
_BEST = {"arithmetic_team_gigpo.py": _wrong_at_first}
# Where a run would stop too soon, or never: what an episode pays at best depends on its task.
_ENDLESS = {"gym_gigpo.py", "sokoban_gigpo.py"}
_STOPS = [(name, ()) for name in _TRAINERS if name not in _ENDLESS]
_STOPS += [("cards_gigpo.py", ("--game", game)) for game in ("Points24", "NumberLine", "Blackjack")]


@pytest.mark.parametrize(("script", "more"), _STOPS)
def test_the_return_that_stops_a_run_can_be_reached(script, more, monkeypatch):
    module = _module(script, monkeypatch)
    args = getattr(module, "parse", module.parser.parse_args)(["--smoke", *more])
    assert args.stop_reward == args.best_return
    config = module.demo_config(args)
    # The demo's episodes are cut short, and its data are there.
    world = {name: value for name, value in config.env_config.items() if name != "horizon"}
    game = Game(config.env_spec.make(world), script)
    best = -math.inf
    for seed in range(64):
        policy, rng = _BEST.get(script, expert), random.Random(seed)
        steps = play_episode(game, config.agent_profile, policy, rng, seed=seed).steps
        # As `episode_return_mean` counts: over a team, the mean of its agents.
        best = max(best, sum(step.reward for step in steps) / len({s.agent for s in steps}))
        if best >= args.best_return:
            break
    assert best >= args.best_return
    # Another unit would be out of reach again, or stop half-trained runs.
    assert best <= 1.1 * args.best_return


@pytest.mark.parametrize("script", sorted(_ENDLESS))
def test_an_example_without_such_a_return_trains_to_its_end(script, monkeypatch):
    args = _module(script, monkeypatch).parser.parse_args([])
    assert args.stop_reward is None


@pytest.mark.parametrize("script", ["search_gigpo.py", "search_team_gigpo.py"])
def test_search_is_evaluated_on_other_questions(script, monkeypatch):
    config = _paper(_module(script, monkeypatch))
    assert config.evaluation_config is not None
    tested = config.evaluation_config["env_config"]
    assert tested.keys() == config.env_config.keys()
    trained, asked = (
        {
            question
            for seed in range(8)
            for question in Game(config.env_spec.make(world), script).reset(seed, None)[0].values()
        }
        for world in (config.env_config, tested)
    )
    assert len(trained) > 1
    assert trained.isdisjoint(asked)


@pytest.mark.parametrize("script", _TRAINERS)
@pytest.mark.parametrize("algo", PRESETS)
def test_every_algorithm_is_valid_everywhere(
    script: str, algo: str, monkeypatch: pytest.MonkeyPatch
):
    module = _module(script, monkeypatch)
    config = _paper(module, "--algo", algo)
    assert config.algorithm_name == algo
    for name, value in PRESETS[algo].settings.items():
        if name != "num_groups":
            assert getattr(config, name) == value, name
    if algo == "grpo":
        assert (config.omega, config.f_norm) == (0.0, "std")
    args = getattr(module, "parse", module.parser.parse_args)(["--smoke", "--algo", algo])
    demo = module.demo_config(args)
    demo.validate()
    assert demo.num_groups * demo.group_size == 4


def test_ppo_plays_as_many_episodes_without_groups(monkeypatch: pytest.MonkeyPatch):
    # 16 x 8 in ALFWorld and 256 x 5 in Search.
    for script, episodes in (("alfworld_gigpo.py", 128), ("search_gigpo.py", 1280)):
        config = _paper(_module(script, monkeypatch), "--algo", "ppo")
        assert (config.num_groups, config.group_size) == (episodes, 1)
        assert (config.critic, config.critic_lr, config.gamma) == ("model", 1e-5, 1.0)


def test_lora_takes_the_settings_of_the_authors_scripts(monkeypatch: pytest.MonkeyPatch):
    config = _paper(_module("alfworld_gigpo.py", monkeypatch), "--model=qwen2.5-7b", "--lora")
    assert config.llm_model == "Qwen/Qwen2.5-7B-Instruct"
    assert (config.lora.rank, config.lora.alpha, config.lr) == (64, 64.0, 3e-6)
    assert (config.kl_coeff, config.base_dtype) == (0.0, "bfloat16")


def test_models_by_short_name(monkeypatch: pytest.MonkeyPatch):
    webshop = _module("webshop_gigpo.py", monkeypatch)
    qwen3 = _paper(webshop, "--model", "qwen3-1.7b")
    assert (qwen3.llm_model, qwen3.kl_coeff) == ("Qwen/Qwen3-1.7B", 0.0)
    assert qwen3.evaluation_samples_per_task == 2
    llama = _paper(_module("alfworld_gigpo.py", monkeypatch), "--model", "llama-3.2-3b")
    assert (llama.llm_model, llama.kl_coeff) == ("meta-llama/Llama-3.2-3B-Instruct", 0.01)
    assert _paper(webshop, "--model", "me/mine").llm_model == "me/mine"
    small = _paper(_module("search_gigpo.py", monkeypatch), "--model", "qwen2.5-3b")
    assert (small.anchor, small.similarity_threshold) == ("similarity", 0.9)


def test_the_ablations_and_sweeps_of_the_paper(monkeypatch: pytest.MonkeyPatch):
    webshop = _module("webshop_gigpo.py", monkeypatch)
    swept = _paper(webshop, "--omega=0.8", "--f-norm=std", "--gamma=0.9")
    assert (swept.omega, swept.f_norm, swept.gamma) == (0.8, "std", 0.9)
    without_step = _paper(webshop, "--algo", "gigpo_no_step")
    assert (without_step.omega, without_step.f_norm) == (0.0, "none")
    without_episode = _paper(webshop, "--algo", "gigpo_no_episode")
    assert (without_episode.omega, without_episode.episode_weight) == (1.0, 0.0)
    exact = _paper(_module("search_gigpo.py", monkeypatch), "--anchor", "exact")
    assert exact.anchor == "exact"


def test_a_flag_that_would_make_another_algorithm_is_refused(monkeypatch: pytest.MonkeyPatch):
    webshop = _module("webshop_gigpo.py", monkeypatch)
    with pytest.raises(ValueError, match=r"--omega 0\.5 with --algo grpo: omega=0\.0"):
        _paper(webshop, "--algo", "grpo", "--omega", "0.5")
    with pytest.raises(ValueError, match="no preset is named 'grop'"):
        _paper(webshop, "--algo", "grop")


def test_appworlds_settings_are_valid_for_both_worlds(tmp_path, monkeypatch):
    module = _module("appworld_gigpo.py", monkeypatch)
    real = ["--python-executable", sys.executable, "--root", str(tmp_path)]
    for arguments, world in ((real, {"python_executable": sys.executable}), ([], {})):
        config = _paper(module, *arguments)
        assert config.env_config["horizon"] == 50
        assert world.items() <= config.env_config.items()
    module.demo_config(module.parser.parse_args([*real, "--smoke"])).validate()


# Groups, steps, rows per optimizer step, iterations, interval of evaluations: the authors' scripts.
_CARDS = {
    "EZPoints": (16, 8, 128, 100, 5),
    "NumberLine": (16, 10, 16, 20, 5),
    "Blackjack": (32, 15, 32, 200, 10),
}


@pytest.mark.parametrize("game", [*_CARDS, "Points24"])
def test_every_game_of_cards_has_its_settings(game: str, monkeypatch):
    module = _module("cards_gigpo.py", monkeypatch)
    args = module.parse(["--game", game])
    config = module.paper_config(args)
    config.validate()
    found = (
        config.num_groups,
        config.env_config["horizon"],
        config.minibatch_size,
        args.stop_iters,
        args.evaluation_interval,
    )
    assert found == _CARDS.get(game, (16, 22, 128, 100, 5))
    assert args.env == config.env == game
    module.demo_config(module.parse(["--game", game, "--smoke"])).validate()


def _algorithm(script: str) -> str:
    # Every name of the rotation occurs, as there are at least as many scripts.
    return _ROTATION[_TRAINERS.index(script) % len(_ROTATION)]


def test_the_rotation_covers_the_algorithms():
    assert {_algorithm(script) for script in _TRAINERS} == set(_ROTATION)


@pytest.mark.examples
@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("script", _TRAINERS)
def test_smoke(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """The script's own main part, in this process: Ray and PyTorch are started once for all."""
    monkeypatch.syspath_prepend(str(_FOLDER))
    monkeypatch.chdir(tmp_path)
    arguments = ["--smoke", "--algo", _algorithm(script), "--results", str(tmp_path / "demo")]
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    runpy.run_path(str(_FOLDER / script), run_name="__main__")
    printed = capsys.readouterr().out
    assert "iteration 2" in printed
    module = importlib.import_module(script.removesuffix(".py"))
    policies = module.demo_config(module.parser.parse_args(arguments)).module_ids
    norms = [float(found) for found in re.findall(r"gradient norm (\S+),", printed)]
    assert len(norms) == 2 * len(policies)
    assert all(map(math.isfinite, norms))
