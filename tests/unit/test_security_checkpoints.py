"""Checkpoints that somebody else wrote are read, and what they name is never run."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ray import cloudpickle
from safetensors.torch import load_file

from rllib_gigpo import AgentProfile, GiGPO, LoRASettings, pickled_arrays, safe_pickle
from rllib_gigpo.agent.parsing import Action
from rllib_gigpo.checkpoints import MANIFEST, Place, _write_manifest, save_whole
from rllib_gigpo.evaluate.main import _player
from rllib_gigpo.export import export
from rllib_gigpo.recording.folder import write_bytes
from rllib_gigpo.trained import trained_as
from rllib_gigpo_cli.parsers import evaluate_parser
from tests.bombs import Bomb
from tests.command_line import run
from tests.tiny_runs import build_learner, module_of, tiny_config


def test_the_bomb_works(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "hit")))
    assert (tmp_path / "hit").is_dir()


def answer_at_once(response: str) -> Action:
    """A parser of one's own."""
    return Action(response, True)


class Own(AgentProfile):
    """A profile of a class of one's own."""


@pytest.fixture(scope="module")
def learner():
    return build_learner()


def checkpoint_of(learner, path: Path, **settings) -> Path:
    """What `algorithm.save_to_path` writes of settings and policy, without Ray."""
    config = tiny_config()
    told = {**config.to_dict(), "profile": config.agent_profile, **settings}
    content = {"class": GiGPO, "ctor_args_and_kwargs": ((told,), {})}

    def write(folder: Path) -> None:
        write_bytes(folder / "class_and_ctor_args.pkl", cloudpickle.dumps(content))
        module = folder / "learner_group" / "learner" / "rl_module" / "default_policy"
        module_of(learner).save_to_path(str(module))

    save_whole(Place.of(path), write)
    return path


@pytest.fixture
def checkpoint(learner, tmp_path) -> Path:
    return checkpoint_of(learner, tmp_path / "checkpoint")


def test_a_checkpoint_is_read_without_running_it(learner, checkpoint, tmp_path, monkeypatch):
    whole = export(checkpoint, tmp_path / "trusted", trust=True)
    trusted = trained_as(checkpoint, trust=True)

    def refuse(*arguments, **options):
        raise AssertionError("unpickled")

    for name in ("load", "loads"):
        monkeypatch.setattr(pickle, name, refuse)
        monkeypatch.setattr(cloudpickle, name, refuse)
    found = trained_as(checkpoint)
    assert (found.env, found.env_config) == ("KeyDoor", {"horizon": 6})
    assert (found.max_prompt_tokens, found.eval_temperature) == (64, trusted.eval_temperature)
    assert found.profile.prompt == trusted.profile.prompt
    plain = export(checkpoint, tmp_path / "plain")
    left, right = (load_file(folder / "model.safetensors") for folder in (whole, plain))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ({"lora": LoRASettings(rank=2)}, "adapter"),
        ({"lora": LoRASettings(rank=2, targets=("q_proj",))}, "merged"),
        ({"model": "tiny-vision", "options": {}}, "full"),
    ],
    ids=["adapter", "merged", "vision"],
)
def test_every_kind_of_policy_is_read_without_trust(model, kind, tmp_path):
    learner = build_learner(tiny_config().llm(**model))
    path = checkpoint_of(learner, tmp_path / "checkpoint")
    for name, trust in (("plain", False), ("trusted", True)):
        export(path, tmp_path / name, kind, trust=trust)
    (file,) = (found.name for found in (tmp_path / "plain").glob("*model.safetensors"))
    left, right = (load_file(tmp_path / name / file) for name in ("plain", "trusted"))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize(
    "name",
    [
        "class_and_ctor_args.pkl",
        "learner_group/learner/rl_module/default_policy/class_and_ctor_args.pkl",
        "learner_group/learner/rl_module/default_policy/module_state.pkl",
        "algorithm_state.pkl",
        "learner_group/state.pkl",
    ],
)
def test_a_bomb_in_a_checkpoint_does_not_go_off(name, checkpoint, bomb, mark, tmp_path):
    write_bytes(checkpoint / name, bomb)
    # A manifest that fits: whoever plants a bomb writes one too.
    (checkpoint / MANIFEST).unlink()
    _write_manifest(checkpoint, {})
    run("evaluate", str(checkpoint), "--tasks", "1", "--output", str(tmp_path / "out"))
    run("export", str(checkpoint), str(tmp_path / "model"))
    run("play", "KeyDoor", "--max-steps", "1", "--model", str(checkpoint))


def test_a_bomb_hidden_in_the_settings_stays_whole(learner, mark, tmp_path):
    for settings in ({"callbacks_class": Bomb(mark)}, {"learner_config_dict": {"x": Bomb(mark)}}):
        path = checkpoint_of(learner, tmp_path / "one", **settings)
        assert trained_as(path).env == "KeyDoor"
    for settings in ({"env_config": {"size": Bomb(mark)}}, {"env": Bomb(mark)}):
        path = checkpoint_of(learner, tmp_path / "two", **settings)
        with pytest.raises(ValueError, match=r"posix\.mkdir.*--trust-checkpoint"):
            trained_as(path)


@pytest.mark.parametrize("own", [lambda: Own, lambda: answer_at_once], ids=["class", "function"])
def test_a_profile_of_ones_own_needs_trust(own, learner, tmp_path):
    made = own()
    usual = tiny_config().agent_profile
    fields = {name: getattr(usual, name) for name in usual.__dataclass_fields__}
    profile = Own(**fields) if made is Own else replace(usual, parser=made)
    path = checkpoint_of(learner, tmp_path / "own", profile=profile)
    with pytest.raises(ValueError, match=r"tests\.unit\.|test_security.*--trust-checkpoint"):
        trained_as(path)
    assert trained_as(path, trust=True).profile.prompt == usual.prompt


@pytest.mark.parametrize(
    "name", ["os:makedirs", "mcp:mkdir {}", "trl:os:makedirs", "skyrl:os:mkdir"]
)
def test_evaluate_makes_no_environment_of_a_stranger(name, learner, mark, tmp_path):
    told = {"env": name.format(mark), "env_config": {"name": str(mark)}}
    path = checkpoint_of(learner, tmp_path / "one", **told)
    done = run("evaluate", str(path), "--tasks", "1", "--output", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert f"names the environment {told['env']!r}" in done.stderr
    assert not mark.exists()
    assert not (tmp_path / "out").exists()


@pytest.fixture
def opened(monkeypatch):
    """What `evaluate` is about to make; it ends there."""

    class OpenedError(Exception):
        pass

    def open_env(name, settings, profile):
        raise OpenedError(name, dict(settings))

    monkeypatch.setattr("rllib_gigpo.evaluate.main.open_env", open_env)

    def of(*arguments):
        with pytest.raises(OpenedError) as found:
            _player(evaluate_parser().parse_args([*map(str, arguments)]))
        return found.value.args

    return of


def test_the_word_of_the_user_opens_what_a_checkpoint_names(opened, learner, tmp_path):
    told = {"env": "os:system", "env_config": {"command": "true", "size": 3}}
    path = checkpoint_of(learner, tmp_path / "one", **told)
    assert opened(path, "--trust-checkpoint") == ("os:system", told["env_config"])
    # The name alone is no word for the settings, nor are the settings for the name.
    typed = ("--env-config", '{"command": "false"}')
    for arguments in ((path,), ("os:system", "--model", path), (path, *typed)):
        with pytest.raises(ValueError, match=r"checkpoint .* (names|sets) .*--trust-checkpoint"):
            _player(evaluate_parser().parse_args([*map(str, arguments)]))
    found = opened("os:system", "--model", path, *typed)
    assert found == ("os:system", {"command": "false", "size": 3})


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        ("KeyDoor", {"size": 3, "view": "local"}),
        ("Sokoban", {"size": (6, 6)}),
        ("ALFWorld", {"games": "shipped", "split": "train"}),
    ],
)
def test_a_checkpoint_of_ones_own_needs_no_word(env, settings, opened, learner, tmp_path):
    path = checkpoint_of(learner, tmp_path / "one", env=env, env_config=settings)
    assert opened(path) == (env, settings)


def test_settings_of_evaluation_are_a_strangers_too(opened, learner, tmp_path):
    own = {"evaluation_config": {"env_config": {"data_dir": "/x"}}}
    path = checkpoint_of(learner, tmp_path / "one", **own)
    with pytest.raises(ValueError, match="sets data_dir='/x'"):
        _player(evaluate_parser().parse_args([str(path)]))


def test_names_that_look_like_the_packages_lead_nowhere(tmp_path, mark):
    """Such as `rllib_gigpo.agent.parsing.re`, or a function that such a module imports."""
    for module, name in (
        ("rllib_gigpo.agent.parsing", "re.compile"),
        ("rllib_gigpo.agent.parsing", "dataclass"),
        ("rllib_gigpo.agent.prompt", "Formatter"),
        ("rllib_gigpo.agent.no_such_module", "x"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("numpy", "load"),
        ("torch.storage", "_load_from_bytes"),
        ("rllib_gigpo.export", "export"),
    ):
        call = f"c{module}\n{name}\n(S'a'\ntR.".encode()
        (tmp_path / "p.pkl").write_bytes(call)
        found = safe_pickle.read(tmp_path / "p.pkl")
        assert isinstance(found, safe_pickle.Unknown)
        assert found.name == f"{module}.{name}"


def test_arrays_and_containers_come_back(tmp_path):
    value = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": [np.float64(0.5), {1, 2}, (True, None, b"x", "y")],
        "c": OrderedDict(x=slice(1, 2)),
    }
    (tmp_path / "p.pkl").write_bytes(pickle.dumps(value))
    found = safe_pickle.read(tmp_path / "p.pkl")
    safe_pickle.check_known("it", found)
    np.testing.assert_array_equal(found.pop("a"), value.pop("a"))
    assert found == value


def known_names():
    """Every class and function that a pickle may name, as (module, name)."""
    modules = [
        module
        for name, module in sorted(sys.modules.items())
        if name.startswith("rllib_gigpo.agent.")
    ]
    named = [(module.__name__, name) for module in modules for name in vars(module)]
    named += [(module, name) for module, names in safe_pickle._PLAIN.items() for name in names]
    named += [(module, name) for module, names in pickled_arrays._NUMPY.items() for name in names]
    return named


def looked_at(module: str, name: str):
    found = sys.modules.get(module) and getattr(sys.modules[module], name, None)
    found = pickled_arrays.stand_in(module, name) or found
    kept = {key: id(value) for key, value in getattr(found, "__dict__", {}).items()}
    return kept, getattr(found, "__code__", None), getattr(found, "__defaults__", None)


@pytest.mark.parametrize("state", ["dictionary", "slots"])
def test_no_pickle_changes_what_was_there_before(state, tmp_path):
    """BUILD with a state sets attributes, of classes and functions for the whole process."""
    path = tmp_path / "p.pkl"
    pairs = b"(X\x08\x00\x00\x00__call__N" + b"X\x05\x00\x00\x00extraI1\nd"
    given = pairs if state == "dictionary" else b"N" + pairs + b"\x86"
    names = known_names()
    assert ("rllib_gigpo.agent.parsing", "TagParser") in names
    assert ("rllib_gigpo.agent.profile", "default_profile") in names
    for module, name in names:
        before = looked_at(module, name)
        path.write_bytes(f"c{module}\n{name}\n".encode() + given + b"b.")
        with contextlib.suppress(safe_pickle.UntrustedPickleError):
            found = safe_pickle.read(path)
            # Nothing of this process, then: an object of the pickle's own.
            assert isinstance(found, safe_pickle.Unknown) or not callable(found), name
        assert looked_at(module, name) == before, name


def test_an_instance_of_the_process_is_not_for_a_pickle_to_change(tmp_path, monkeypatch):
    module = sys.modules["rllib_gigpo.agent.parsing"]
    shared = module.TagParser()
    monkeypatch.setattr(module, "shared", shared, raising=False)
    (tmp_path / "p.pkl").write_bytes(
        b"crllib_gigpo.agent.parsing\nshared\n}X\x01\x00\x00\x00aI1\nsb."
    )
    with contextlib.suppress(safe_pickle.UntrustedPickleError):
        assert safe_pickle.read(tmp_path / "p.pkl") is not shared
    assert not hasattr(shared, "a")


@pytest.mark.parametrize(
    "spec",
    ["O", "O8", "i8,O", "i8,i8", "(2,)i8", "2i8", "V8", "M8[s]", "i8 ", "S0", "U", "", ">O", 5],
)
def test_an_array_is_of_numbers_or_of_fixed_text(spec, tmp_path):
    made = pickled_arrays.PickledDtype(spec)
    with pytest.raises(ValueError, match="an array of"):
        _ = made.plain


@pytest.mark.parametrize("dtype", ["?", "i1", "u8", "f2", "f4", "c16", "S3", "U2", ">i4", "<f8"])
def test_usual_arrays_and_scalars_are_read(dtype, tmp_path):
    value = np.ones(3, dtype)
    (tmp_path / "p.pkl").write_bytes(pickle.dumps([value, value[0]]))
    array, scalar = safe_pickle.read(tmp_path / "p.pkl")
    np.testing.assert_array_equal(array, value)
    assert (scalar, array.dtype.itemsize) == (value[0], value.dtype.itemsize)


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_fail(content):
    with TemporaryDirectory() as folder:
        path = Path(folder, "p.pkl")
        path.write_bytes(content)
        with contextlib.suppress(ValueError, EOFError, pickle.UnpicklingError):
            safe_pickle.read(path)
