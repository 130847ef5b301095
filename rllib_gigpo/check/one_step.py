"""One real training step on a small copy of the model."""

from __future__ import annotations

import logging
import math
import tempfile
import time
from pathlib import Path

import ray

from rllib_gigpo.check.findings import Finding
from rllib_gigpo.check.small_copy import MOST_PARAMETERS, parameters_of, small_copy
from rllib_gigpo.config import GiGPOConfig
from rllib_gigpo.models import materialize
from rllib_gigpo.vision.sight import load_sight

_STEPS, _RESPONSE_TOKENS = 3, 24


def cut_to_a_step(config: GiGPOConfig, model: Path) -> GiGPOConfig:
    """Return the settings of the step: as they are, but small and in this process."""
    small = config.copy(copy_frozen=False)
    group_size = min(2, config.group_size)
    return (
        small.llm(
            model=str(model),
            options={},
            dtype="float32",
            base_dtype="float32",
            max_response_tokens=min(config.max_response_tokens, _RESPONSE_TOKENS),
        )
        .agent(max_episode_steps=_STEPS)
        .engines(engine="transformers", num_engines=1, engine_num_gpus=0.0, engine_sleep=False)
        .engines(engine_options={}, weight_sync="auto")
        .env_runners(num_env_runners=0)
        .learners(num_learners=0, num_gpus_per_learner=0, sharding="replicate")
        .learners(offload_to_cpu=False, use_liger_kernel=False)
        .evaluation(evaluation_interval=None, evaluation_num_env_runners=0, evaluation_config=None)
        .recording(enabled=False)
        .training(
            num_groups=4 // group_size,
            group_size=group_size,
            num_minibatches=1,
            num_epochs=1,
            max_sampling_rounds=1,
            max_staleness=0,
            micro_batch_tokens=min(config.micro_batch_tokens, 4096),
        )
    )


def step_part(config: GiGPOConfig) -> list[Finding]:
    """Play four short episodes with a copy of the model and learn from them once."""
    path = materialize(config.model_spec)
    # A vision tower has sizes of its own, which have to fit those of the text.
    is_whole = load_sight(path) is not None
    if is_whole and parameters_of(path) > MOST_PARAMETERS:
        return [Finding("one step", "note", "not taken: models that see are not cut down")]
    started_here = not ray.is_initialized()
    try:
        with tempfile.TemporaryDirectory() as folder:
            if is_whole:
                model, parameters = Path(path), parameters_of(path)
            else:
                model, parameters = small_copy(path, Path(folder) / "copy")
            if started_here:
                ray.init(
                    address="local",
                    num_cpus=2,
                    include_dashboard=False,
                    logging_level=logging.ERROR,
                    log_to_driver=False,
                )
            return [_train(cut_to_a_step(config, model), parameters)]
    except Exception as error:  # whatever breaks here would break the run
        return [Finding("one step", "FAULT", f"{type(error).__name__}: {error}")]
    finally:
        if started_here and ray.is_initialized():
            ray.shutdown()


def _train(config: GiGPOConfig, parameters: int) -> Finding:
    start = time.perf_counter()
    algorithm = config.build_algo()
    try:
        result = algorithm.train()
    finally:
        algorithm.stop()
    found = result["env_runners"]
    norms = [
        float(learned["gradient_norm"])
        for learned in result["learners"].values()
        if "gradient_norm" in learned
    ]
    if not norms or not all(map(math.isfinite, norms)):
        return Finding("one step", "FAULT", f"the gradient norm is {norms}: the loss is not finite")
    return Finding(
        "one step",
        "ok",
        f"a model of {parameters / 1e6:.1f} M parameters: {found['num_episodes']:.0f} episodes, "
        f"{found['num_env_steps_sampled']:.0f} rows, gradient norm "
        f"{', '.join(f'{norm:.3g}' for norm in norms)}, {time.perf_counter() - start:.0f} s",
    )
