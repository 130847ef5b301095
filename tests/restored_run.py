"""Continue runs from their checkpoints in a process of its own.

    python -m tests.restored_run <Ray address> <iterations> <checkpoint> <output file> ...

Writes a torch file per checkpoint: {"facts": one dict per iteration, "weights": the learner's,
"tasks": the reset seeds of the first iteration}.
"""

import sys

import ray
import torch

from rllib_gigpo import GiGPO
from rllib_gigpo.sampler import training_tasks
from tests.ray_runs import facts_of, weights_of


def main(address: str, iterations: str, *files: str) -> None:
    """Restore, train, write."""
    torch.set_num_threads(1)
    ray.init(address=address, log_to_driver=False)
    for checkpoint, output in zip(files[::2], files[1::2], strict=True):
        algorithm = GiGPO.from_checkpoint(checkpoint)
        tasks = training_tasks(algorithm.config, algorithm.num_updates)
        facts = [facts_of(algorithm.train()) for _ in range(int(iterations))]
        torch.save(
            {
                "facts": facts,
                "weights": weights_of(algorithm),
                "tasks": [task.env_seed for task in tasks],
            },
            output,
        )
        algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
