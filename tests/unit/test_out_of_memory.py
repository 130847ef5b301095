"""What is told to be lowered when memory runs out; whole runs are in tests/contract."""

import pytest

from rllib_gigpo.out_of_memory import OutOfMemory, naming_memory
from tests.tiny_runs import tiny_config


# What is set already is not told as the cure; 16 groups of 8 episodes are this configuration's own.
@pytest.mark.parametrize(
    ("phase", "given", "told"),
    [
        ("grouping", {}, "lower training(num_groups=..., group_size=...), now 16 and 8"),
        (
            "setup",
            {"num_learners": 2},
            "the learners' models and optimizer states do not fit: set learners(sharding='fsdp', "
            "num_learners=...), now 2; or llm(lora=LoRASettings(...))",
        ),
        (
            "setup",
            {"num_learners": 4, "sharding": "fsdp"},
            "the learners' models and optimizer states do not fit: raise learners("
            "num_learners=...), now 4; or llm(lora=LoRASettings(...))",
        ),
    ],
)
def test_the_cure_is_one_that_can_help(phase, given, told):
    config = tiny_config(num_groups=16, group_size=8).learners(**given)
    with pytest.raises(OutOfMemory) as error, naming_memory(phase, config):
        raise MemoryError
    assert str(error.value) == f"out of memory in the phase '{phase}': {told} (MemoryError: )"
