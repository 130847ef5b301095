"""docs/metrics.md explains every number that training reports."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.tiny_runs import tiny_config

_PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
_TEXT = re.sub(r"^```.*?^```$", "", _PAGE, flags=re.DOTALL | re.MULTILINE)
_NAMES = set(re.findall(r"`([^`]+)`", _TEXT))
# RLlib's own, which the page names by their endings.
_OF_RLLIB = re.compile(r"(_lifetime|_throughput|throughput_since_last_\w+)$")


def _keys(found: Mapping, prefix: str = "") -> Iterator[str]:
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}"


def _is_explained(key: str) -> bool:
    if _OF_RLLIB.search(key):
        return True
    # `success_rate/<task type>` explains success_rate/Pick.
    forms = {key, *(re.sub(r"/[^/]+$", f"/{mark}", key) for mark in ("<size>", "<agent>"))}
    forms |= {re.sub(r"/[^/]+$", f"/{mark}", key) for mark in ("<module>", "<task type>")}
    return bool(forms & _NAMES)


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_every_key_is_explained():
    algorithm = tiny_config(kl_coeff=0.1).recording(enabled=False).build_algo()
    result = algorithm.train()
    algorithm.stop()
    keys = {*_keys(result["env_runners"]), *_keys(result["timers"])}
    keys |= set(_keys(result["learners"]["default_policy"]))
    missing = sorted(key for key in keys if not _is_explained(key))
    assert missing == []
    assert {"success_rate", "kl", "sync"} <= keys


def test_an_unknown_key_is_found_missing():
    assert not _is_explained("brand_new_number")
    assert _is_explained("step_groups/group_share/2-5")
    assert _is_explained("success_rate/Pick")
