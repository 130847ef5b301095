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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests without Ray first.

    A process that is connected to Ray shares its registry with the cluster, so that a name one test
    registers would be found by the next.
    """
    items.sort(key=lambda item: "local_ray" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def local_ray():
    """A local Ray, started for the first test that asks and stopped after the last test.

    Ray counts CPUs logically: with the two of a small machine, runners and learners would wait for
    each other for ever.
    """
    import ray

    context = ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False)
    yield context
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
