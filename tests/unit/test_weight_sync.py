"""The proof after each sync: an engine that does not serve the learner's weights is found out."""

from functools import partial

import pytest
import torch

from rllib_gigpo import GiGPOConfig, weight_sync
from rllib_gigpo.engines.published import Published, check_held
from rllib_gigpo.weight_sync import WeightSync, never_trained
from tests.tiny_runs import build_learner, module_of, tiny_config


def config_of(**llm) -> GiGPOConfig:
    settings = {"model": "tiny", "max_prompt_tokens": 64, "max_response_tokens": 8, **llm}
    return GiGPOConfig().environment("KeyDoor").llm(**settings)


def test_checksums_must_be_the_learners_for_every_tensor():
    published = Published("weights", None, 3, {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5})
    check_held(published, {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "tied": 6})
    with pytest.raises(RuntimeError, match=r"version 3 .* 1 of 5 differ or are missing \(b\)"):
        check_held(published, {"a": 1, "b": 0, "c": 3, "d": 4, "e": 5})
    with pytest.raises(RuntimeError, match=r"4 of 5 differ or are missing \(a, b, c, \.\.\.\)"):
        check_held(published, {"e": 5})
    with pytest.raises(RuntimeError, match="5 of 5"):
        check_held(published, {})


class Fleet:
    """Engine actors that note in which order they are asked."""

    fleet = None

    def __init__(self, held: dict[str, int]):
        self.asked: list[str] = []
        self.held = held

    def __getattr__(self, name: str):
        def call(*arguments):
            self.asked.append(name)
            return [self.held] if name == "all_checksums" else None

        return call


def sync_of(monkeypatch, fleet: Fleet, **engines) -> WeightSync:
    config = config_of().learners(num_gpus_per_learner=0.5)
    config.engines(engine="vllm", engine_num_gpus=0.5, weight_sync="ray", probe_tolerance=0)
    config.engines(**engines)
    config.validate()
    monkeypatch.setattr(WeightSync, "_start_fleet", lambda self: fleet)
    sent = {"default_policy": Published("weights", None, 4, {"a": 1})}

    def first_learner(call):
        # The engines' list notes too when the learner is asked to let go of memory.
        return sent if isinstance(call, partial) else call(fleet)

    return WeightSync(config, [], first_learner, learner_is_local=True)


def test_engines_on_a_shared_gpu_wake_after_their_weights_have_come(monkeypatch):
    fleet = Fleet({"a": 1})
    sync = sync_of(monkeypatch, fleet, engine_sleep=True)
    sync.sleep()
    sync.push(4)
    # The weights take back their own memory when they are loaded; the cache follows, once the
    # learner has let go of the copies that it sent from.
    assert fleet.asked == ["sleep", "publish", "release_memory", "wake", "all_checksums"]
    assert set(sync.seconds) == {"publish", "load", "checksums", "probe"}


def test_engines_that_need_not_sleep_are_left_alone(monkeypatch):
    fleet = Fleet({"a": 1})
    sync = sync_of(monkeypatch, fleet)
    sync.sleep()
    sync.push(4)
    assert fleet.asked == ["publish", "all_checksums"]
    assert sync.version == 4


def test_checksums_are_compared_without_a_probe_too(monkeypatch):
    sync = sync_of(monkeypatch, Fleet({"a": 2}))
    with pytest.raises(RuntimeError, match="1 of 1 differ"):
        sync.push(4)


def test_the_road_decides_whether_the_learner_sends_by_itself(monkeypatch):
    sync = sync_of(monkeypatch, Fleet({"a": 1}))
    assert sync._sender("default_policy") is None
    sync = sync_of(monkeypatch, Fleet({"a": 1}), weight_sync="ipc")
    sent = []
    sync._first_learner = lambda call: sent.append(call.keywords)
    sync._sender("default_policy")(["engine"], ["first"])
    assert sent == [
        {
            "road": "ipc",
            "module_id": "default_policy",
            "engines": ["engine"],
            "incarnations": ["first"],
            "version": -1,
        }
    ]


def test_policies_outside_the_list_are_never_trained():
    config = config_of().multi_agent(policies={"a", "b"})
    assert never_trained(config) == frozenset()
    assert never_trained(config.multi_agent(policies_to_train=["a"])) == {"b"}
    # A function may name any policy at any time.
    assert never_trained(config.multi_agent(policies_to_train=lambda m, _: m == "a")) == frozenset()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_learner_leaves_out_what_engines_have_already(dtype):
    learner = build_learner(tiny_config().llm(dtype=dtype))
    (sent,) = learner.published(0).values()
    known = {"default_policy": sent.checksums}
    assert learner.published(1, known) == {}
    with torch.no_grad():
        next(iter(module_of(learner).lm.parameters())).mul_(2.0)
    (again,) = learner.published(2, known).values()
    assert again.version == 2
    assert again.checksums != sent.checksums


class TeamFleet(Fleet):
    """Engines of two policies that note what they are sent."""

    def __init__(self) -> None:
        super().__init__({})
        self.sent: list[tuple[str, int]] = []
        self.serves: dict[str, dict[str, int]] = {}

    def publish(self, policy_id: str, published: Published, send: object) -> None:
        self.sent.append((policy_id, published.version))
        self.serves[policy_id] = dict(published.checksums)

    def all_checksums(self, policy_id: str) -> list[dict[str, int]]:
        return [self.serves[policy_id]]


class TeamLearner:
    """Its policy "a" changes with every version; "b" when the test says so."""

    frozen = 7

    def published(self, version: int, known) -> dict[str, Published]:
        sums = {"a": {"w": version}, "b": {"w": self.frozen}}
        return {
            name: Published("weights", None, version, sums[name])
            for name in sums
            if known.get(name) != sums[name]
        }


def test_a_frozen_policy_is_sent_once_and_again_after_a_change(monkeypatch):
    config = config_of().engines(engine="vllm", probe_tolerance=0)
    config.multi_agent(
        policies={"a", "b"}, policy_mapping_fn=lambda *_, **__: "a", policies_to_train=["a"]
    )
    fleet, learner = TeamFleet(), TeamLearner()
    monkeypatch.setattr(WeightSync, "_start_fleet", lambda self: fleet)
    monkeypatch.setattr(weight_sync.ray, "put", lambda packed: packed)
    sync = WeightSync(config, [], lambda call: call(learner), learner_is_local=True)
    for version in (0, 1):
        sync.push(version)
    assert fleet.sent == [("a", 0), ("b", 0), ("a", 1)]
    learner.frozen = 8
    sync.push(2)
    sync.push(3)
    assert fleet.sent[3:] == [("a", 2), ("b", 2), ("a", 3)]
    # Its checksums are compared after every sync all the same.
    fleet.serves["b"] = {"w": 7}
    with pytest.raises(RuntimeError, match="version 2 an engine computes with other tensors"):
        sync.push(4)
