"""Settings and fixtures of all tests."""

import os
import pickle

# Set before torch and Ray are imported, and inherited by Ray's workers: models this small run
# fastest on one thread, and several processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

torch.set_num_threads(1)

# Time limits of single examples fail on busy machines; pytest-timeout limits whole tests. The same
# commit fails or passes on every machine; RLLIB_GIGPO_FUZZ=1 draws new examples.
hypothesis.settings.register_profile(
    "project", deadline=None, derandomize="RLLIB_GIGPO_FUZZ" not in os.environ
)
hypothesis.settings.load_profile("project")

_REGISTERED: dict = {}


def _uses_ray(item: pytest.Item) -> bool:
    return "local_ray" in getattr(item, "fixturenames", ())


def _is_learning(item: pytest.Item) -> bool:
    return item.path.parent.name == "learning"


def _group(item: pytest.Item) -> str:
    """Return what shares a process where several run the tests (`pytest -n 2 --dist loadgroup`)."""
    if item.get_closest_marker("vllm"):
        return "vllm"
    # What starts Ray takes longer than all else: the learning tests go with whoever is free.
    needs_ray = _uses_ray(item) or item.get_closest_marker("ray")
    return "ray" if needs_ray and not _is_learning(item) else item.path.stem


def _rank(item: pytest.Item) -> tuple[int, bool]:
    """Return the place of a test where several processes share them: what takes longest first."""
    longest = ("ray", "vllm")
    if (group := _group(item)) in longest:
        return longest.index(group), not _uses_ray(item)
    return len(longest) + (not _is_learning(item)), False


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in a hook of its own
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the tests with Ray side by side: last, or first where several processes run the tests.

    Those that learn are spread over the processes: then two local clusters may be up at once.
    """
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=_rank if hasattr(config, "workerinput") else _uses_ray)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start Ray for a test that asks for it, and leave it before one that does not.

    A process that is connected to Ray shares its registry with the cluster, so that a name one test
    registers would be found by the next, and what modules registered at their import goes with the
    cluster, if it is not kept here. Ray counts CPUs logically: with the two of a small
    machine, runners and learners would wait for each other for ever.
    """
    import ray
    from ray.tune.registry import _global_registry

    if ray.is_initialized() and not _uses_ray(item):
        ray.shutdown()
        _global_registry._to_flush.update(_REGISTERED)
    elif _uses_ray(item) and not ray.is_initialized():
        _REGISTERED.update(_global_registry._to_flush)
        ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False)


@pytest.fixture(scope="session")
def local_ray():
    """A local Ray, which `pytest_runtest_setup` starts; it ends with the tests."""
    import ray

    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def warm_model(tmp_path_factory):
    """Folder of a tiny model that plays small KeyDoors badly, but in the right format."""
    from tests.ray_runs import warm_started_model

    return warm_started_model(tmp_path_factory.mktemp("warm") / "model")


@pytest.fixture
def mark(tmp_path):
    """A path that exists only if a bomb went off."""
    path = tmp_path / "went-off"
    yield path
    assert not path.exists()


@pytest.fixture
def bomb(mark) -> bytes:
    """A pickle that makes `mark` when it is read."""
    from tests.bombs import Bomb

    return pickle.dumps(Bomb(mark))
