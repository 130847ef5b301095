"""Environments by name: registered, bundled, gymnasium's, and what is said when none is found."""

import pickle
import re
import subprocess
import sys
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint
from pathlib import Path

import gymnasium
import pytest
from ray.tune.registry import ENV_CREATOR, _global_registry, register_env

from envs.key_door import KeyDoor
from envs.key_door_team import KeyDoorTeam
from rllib_gigpo import registry
from rllib_gigpo.agent import AgentProfile, ChatTemplate, LastSteps, NoMemory
from rllib_gigpo.registry import get_env_spec, register_llm_env
from tests.fakes import Countdown

OWN = AgentProfile(ChatTemplate("{observation}"), memory=NoMemory())


@pytest.fixture(autouse=True)
def _forget_what_a_test_registers(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(_global_registry, "_to_flush", {})


def test_a_registered_class_gets_env_config_as_keywords():
    register_llm_env("Count", Countdown)
    env = get_env_spec("Count").make({"start": 7})
    assert isinstance(env, Countdown)
    assert env.start == 7
    assert get_env_spec("Count").make().start is None


def test_a_registered_callable_gets_env_config_as_a_mapping():
    register_llm_env("Count", lambda env_config: Countdown(start=env_config["from"] + 1))
    assert get_env_spec("Count").make({"from": 3}).start == 4


def test_registering_again_replaces():
    register_llm_env("Count", lambda env_config: Countdown(1))
    register_llm_env("Count", lambda env_config: Countdown(2))
    assert get_env_spec("Count").make().start == 2


def test_an_environment_without_a_profile_gets_the_default_one():
    register_llm_env("Count", Countdown)
    profile = get_env_spec("Count").profile()
    assert isinstance(profile.memory, LastSteps)
    assert "admissible actions" in profile.prompt.user


@pytest.mark.parametrize("given", [OWN, lambda: OWN], ids=["profile", "callable"])
def test_a_profile_is_given_as_it_is_or_made(given):
    register_llm_env("Count", Countdown, profile=given)
    assert get_env_spec("Count").profile() is OWN


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Countdown(),), r"register_llm_env\('Count', ...\) got a Countdown: pass an environment"),
        ((Countdown, None), r"profile=...\) got a NoneType: pass an AgentProfile"),
    ],
)
def test_what_is_no_creator_or_no_profile_is_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        register_llm_env("Count", *arguments)


@pytest.mark.parametrize(
    ("name", "cls", "view"),
    [("KeyDoor", KeyDoor, "full"), ("KeyDoorLocal", KeyDoor, "local")],
)
def test_bundled_environments_are_found_with_their_arguments_and_profile(name, cls, view):
    spec = get_env_spec(name)
    env = spec.make({"size": 3})
    assert isinstance(env, cls)
    assert (env.size, env.view) == (3, view)
    assert isinstance(spec.profile().memory, NoMemory)


def test_a_bundled_team_is_found():
    assert isinstance(get_env_spec("KeyDoorTeam").make({"horizon": 6}), KeyDoorTeam)


def test_env_config_overrides_the_entrys_arguments():
    assert get_env_spec("KeyDoorLocal").make({"view": "full"}).view == "full"


def test_a_gymnasium_id_is_made_by_gymnasium():
    gymnasium.register("Count-v3", entry_point=Countdown, kwargs={"start": 2})
    try:
        spec = get_env_spec("Count-v3")
        assert spec.make().unwrapped.start == 2
        assert spec.make({"start": 5}).unwrapped.start == 5
        assert "admissible actions" in spec.profile().prompt.user
    finally:
        del gymnasium.registry["Count-v3"]


def test_an_own_name_wins_over_a_bundled_one():
    register_llm_env("KeyDoor", lambda env_config: Countdown(1))
    assert isinstance(get_env_spec("KeyDoor").make(), Countdown)


def test_an_unknown_name_is_answered_with_the_closest_one():
    register_llm_env("Countdown", Countdown)
    with pytest.raises(ValueError, match="no environment is called 'Countdwon'") as error:
        get_env_spec("Countdwon")
    assert "did you mean 'Countdown'?" in str(error.value)
    with pytest.raises(ValueError, match="did you mean 'KeyDoor'"):
        get_env_spec("KeyDor")


def test_a_name_like_no_other_is_answered_with_the_list():
    with pytest.raises(ValueError, match="'Zzzz'") as error:
        get_env_spec("Zzzz")
    assert "did you mean" not in str(error.value)
    assert "'KeyDoorTeam'" in str(error.value)
    assert "register_llm_env(name, creator)" in str(error.value)


# Schemes -----------------------------------------------------------------------------------------


def test_what_follows_a_scheme_is_the_target():
    spec = get_env_spec("gym:FrozenLake-v1")
    env = spec.make({"kwargs": {"map_name": "8x8"}})
    assert (env.target, env.horizon) == ("FrozenLake-v1", 100)
    assert len(env.reset(seed=0)[0].splitlines()) == 8
    assert "admissible actions" in spec.profile().prompt.user


def test_a_target_may_hold_colons():
    env = get_env_spec("mcp:http://host:8000/mcp").make({"reward": len})
    assert env.target == "http://host:8000/mcp"


def test_another_process_of_the_job_finds_what_a_scheme_made(monkeypatch):
    get_env_spec("trl:tests.dial_worlds:DialEnv")
    carried = _global_registry._to_flush[(ENV_CREATOR, "trl:tests.dial_worlds:DialEnv")]
    env = pickle.loads(carried)({"horizon": 3})
    assert (env.target, env.horizon) == ("tests.dial_worlds:DialEnv", 3)


def test_a_plug_in_adds_a_scheme_of_its_own(monkeypatch):
    def create(env_config):
        return Countdown(env_config["start"] + len(env_config["target"]))

    own = registry.LLMEnvSpec("count:", create, defaults={"start": 1})
    monkeypatch.setattr(registry, "_plugins", lambda: {"count:": own})
    assert get_env_spec("count:four").make().start == 5
    assert get_env_spec("count:four").make({"start": 2}).start == 6


@pytest.mark.parametrize("name", ["gym:", "gim:FrozenLake-v1", "gym"])
def test_a_scheme_without_a_target_or_of_another_name_is_refused(name):
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        get_env_spec(name).make()


# Other processes ---------------------------------------------------------------------------------


def test_another_process_of_the_job_finds_environment_and_profile(monkeypatch):
    register_llm_env("Count", lambda env_config: Countdown(9), profile=OWN)
    # A worker starts with an empty table; what it shares with the driver is Ray's registry.
    monkeypatch.setattr(registry, "_registered", {})
    spec = get_env_spec("Count")
    assert spec.make().start == 9
    assert isinstance(spec.profile().memory, NoMemory)
    assert spec.profile().prompt == OWN.prompt


def test_the_drivers_name_wins_over_a_bundled_one_in_other_processes(monkeypatch):
    register_llm_env("KeyDoor", lambda env_config: Countdown(1))
    monkeypatch.setattr(registry, "_registered", {})
    assert isinstance(get_env_spec("KeyDoor").make(), Countdown)


def test_what_the_workers_get_is_pickled_by_value():
    register_llm_env("Count", lambda env_config: Countdown(9))
    carried = _global_registry._to_flush[(ENV_CREATOR, "Count")]
    assert pickle.loads(carried)({}).start == 9


def test_an_environment_registered_with_ray_alone_gets_the_default_profile():
    register_env("Count", lambda env_config: Countdown(env_config["n"]))
    spec = get_env_spec("Count")
    assert spec.make({"n": 3}).start == 3
    assert isinstance(spec.profile().memory, LastSteps)


# Another package called envs ---------------------------------------------------------------------


@pytest.fixture
def search_path(monkeypatch, tmp_path) -> Path:
    """A folder that alone is searched for `envs`, as if this process had not imported it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "envs"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    return tmp_path


def plugins(monkeypatch, *entry_points: EntryPoint):
    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: entry_points)
    return registry._plugins.__wrapped__()


BUNDLED = EntryPoint("bundled", "envs.catalog:ENVIRONMENTS", registry.ENTRY_POINT_GROUP)


@pytest.mark.parametrize("installed", [(BUNDLED,), ()], ids=["installed", "checkout"])
@pytest.mark.parametrize("shape", ["envs/__init__.py", "envs.py", "envs"])
def test_another_package_called_envs_is_named(search_path, monkeypatch, installed, shape):
    place = search_path / shape
    place.parent.mkdir(exist_ok=True)
    place.touch() if place.suffix else place.mkdir()
    message = rf"another package called 'envs' \({re.escape(str(place))}\) hides .* PYTHONPATH"
    with pytest.raises(ImportError, match=message):
        plugins(monkeypatch, *installed)


def test_where_there_is_no_envs_at_all_other_names_still_work(search_path, monkeypatch):
    assert plugins(monkeypatch) == {}


def test_a_module_that_the_catalogue_lacks_is_not_taken_for_a_shadow(search_path, monkeypatch):
    (search_path / "envs").mkdir()
    (search_path / "envs" / "__init__.py").touch()
    (search_path / "envs" / "catalog.py").write_text("import a_missing_simulator")
    with pytest.raises(ModuleNotFoundError, match="'a_missing_simulator'"):
        plugins(monkeypatch)


def test_an_installed_environment_class_is_found_under_its_entry_points_name(monkeypatch):
    own = EntryPoint("Count", "tests.fakes:Countdown", registry.ENTRY_POINT_GROUP)
    found = plugins(monkeypatch, own, BUNDLED)
    assert found["Count"].make({"start": 6}).start == 6
    assert "KeyDoor" in found


def test_a_gymnasium_id_is_made_where_nothing_registers_it():
    gymnasium.register("Count-v4", entry_point=Countdown, kwargs={"start": 2})
    spec = get_env_spec("Count-v4")
    del gymnasium.registry["Count-v4"]  # as in a worker that has not imported its module
    assert spec.make({"start": 5}).unwrapped.start == 5
    assert spec.make().unwrapped.start == 2


def test_a_class_is_found_by_its_module():
    spec = get_env_spec("tests.fakes:Countdown")
    env = spec.make({"start": 3})
    assert isinstance(env, Countdown)
    assert env.start == 3
    assert isinstance(spec.profile(), AgentProfile)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tests.nowhere:Env", "there is no module 'tests.nowhere'; run from the folder"),
        ("tests.fakes:Env", "module 'tests.fakes' has no 'Env'"),
        (":Env", "':Env' names no object: expected module:attribute"),
    ],
)
def test_a_class_that_does_not_exist_is_named(name, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        get_env_spec(name)


def test_what_a_module_of_ones_own_lacks_is_told_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "lacking.py").write_text("import some_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="some_package_that_is_not_there"):
        get_env_spec("lacking:Env")


def test_a_module_in_the_working_folder_is_found_from_a_console_script(tmp_path):
    (tmp_path / "mine_here.py").write_text("class Env:\n    pass\n")
    # A console script's path begins with the script's own folder; -P leaves out the working one.
    code = (
        "from rllib_gigpo.registry import load_object; print(load_object('mine_here:Env').__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["Env"]
