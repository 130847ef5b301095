"""What `benchmarks.update` measures, each part in a process of its own.

    python -m benchmarks.update_parts '{"part": "memory", "what": "ours", ...}'

The last line is the part's answer as JSON. Seconds are CPU seconds of the process, which has one
thread; peaks are of its resident memory.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.policy.sample_batch import SampleBatch

from benchmarks.report import timed
from envs.spaces import TextSpace
from rllib_gigpo import GiGPOConfig
from rllib_gigpo.memory_estimate import estimate, plan_of
from rllib_gigpo.models import ModelSpec, load_causal_lm, materialize
from rllib_gigpo.objective import Objective, StepTotals
from rllib_gigpo.rows import complete_batch, object_array
from rllib_gigpo.sequences import MicroBatch, pack, response_logps
from rllib_gigpo.update_rows import step_rows

MODEL = "smollm2-135m"
_GIB = 2**30


def tokens(rows: int, prompt: int, response: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Random prompts and responses, different in every row."""
    draws = np.random.default_rng(0)
    sizes = (prompt, response)
    return tuple(
        [draws.integers(100, 49_000, size).astype(np.int32) for _ in range(rows)] for size in sizes
    )  # pyright: ignore[reportReturnType]


def batch(rows: int, prompt: int, response: int) -> SampleBatch:
    """The same as rows of a learner: one group, returns 0 and 1 in turn."""
    return _rows(*tokens(rows, prompt, response))


def tiny_rows(rows: int) -> SampleBatch:
    """Rows for the tiny model of KeyDoor, whose vocabulary has more than 30 words."""
    draws = np.random.default_rng(0)
    prompts, responses = (
        [draws.integers(0, 30, size).astype(np.int32) for _ in range(rows)] for size in (40, 8)
    )
    return _rows(prompts, responses)


def _rows(prompts: list[np.ndarray], responses: list[np.ndarray]) -> SampleBatch:
    rows = len(prompts)
    return complete_batch(
        SampleBatch(
            {
                "group": np.zeros(rows, np.int64),
                "episode": np.arange(rows),
                "step": np.zeros(rows, np.int64),
                "anchor": np.arange(rows),
                "reward": np.arange(rows) % 2.0,
                "prompt_ids": object_array(prompts),
                "response_ids": object_array(responses),
                "response_logps": object_array([np.zeros(len(r), np.float32) for r in responses]),
            }
        )
    )


def config(prompt: int, response: int, micro_batch_tokens: int, **learners: Any) -> GiGPOConfig:
    """Settings of a learner of SmolLM2 in bf16, fp32 masters, AdamW."""
    return (
        GiGPOConfig()
        .environment("KeyDoor")
        .llm(model=MODEL, dtype="bfloat16", max_prompt_tokens=prompt, max_response_tokens=response)
        .training(kl_coeff=0.0, minibatch_size=None, micro_batch_tokens=micro_batch_tokens)
        .learners(**learners)
    )


def build(settings: GiGPOConfig) -> Any:
    """Build a learner in this process."""
    return settings.build_learner(spaces={DEFAULT_MODULE_ID: (TextSpace(), TextSpace())})


def rows_of_step(learner: Any, rows: SampleBatch) -> SampleBatch:
    """Prepare the rows of the one optimizer step of an update."""
    learner.before_gradient_based_update(timesteps={})
    learner._prepare(DEFAULT_MODULE_ID, rows)
    return step_rows(learner.config, rows, np.arange(len(rows["group"])))


class BareLoop:
    """Forward, log-softmax, loss, backward, AdamW: what nobody can leave out."""

    def __init__(self, packed: list[MicroBatch], advantages: np.ndarray):
        self.model: Any = load_causal_lm(materialize(ModelSpec(MODEL)), dtype=torch.float32).eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        self.packed = packed
        self.advantages = torch.tensor(advantages, dtype=torch.float32)

    def __call__(self) -> None:
        """Take one optimizer step."""
        self.optimizer.zero_grad(set_to_none=True)
        total = sum(int(part.mask.sum()) for part in self.packed)
        for part in self.packed:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                hidden = self.model.base_model(
                    input_ids=part.input_ids, use_cache=False
                ).last_hidden_state
                places = torch.arange(len(part.input_ids))[:, None].expand_as(part.mask)
                logits = self.model.lm_head(hidden[places[part.mask], part.positions[part.mask]])
            logps = torch.log_softmax(logits.float(), -1)
            chosen = logps.gather(1, part.targets[part.mask][:, None]).squeeze(1)
            weights = self.advantages[part.rows[part.index]][:, None].expand_as(part.mask)
            (-(weights[part.mask] * chosen).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def floor(rows: int, prompt: int, response: int, repeats: int) -> dict[str, Any]:
    """Optimizer steps of the learner and of the bare loop in turns, on the same micro-batches."""
    budget = rows // 2 * (prompt + response)
    learner = build(config(prompt, response, budget))
    chosen: Any = rows_of_step(learner, batch(rows, prompt, response))
    bare = BareLoop(pack(chosen["prompt_ids"], chosen["response_ids"], budget), chosen["advantage"])

    def ours() -> None:
        learner._uncompiled_update({DEFAULT_MODULE_ID: chosen})

    return {**in_turns({"ours": ours, "bare": bare}, repeats), "tokens": rows * (prompt + response)}


def in_turns(works: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """CPU seconds of every work, in turns, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats + 1):
        for name, work in works.items():
            spent = timed(work)[1]
            if turn:
                seconds[name].append(spent)
    return seconds


class OurLoss:
    """Loss and backward by this package's parts on a model in bf16."""

    def __init__(self, model: Any, rows: int, prompt: int, response: int):
        self.model = model
        (self.packed,) = pack(*tokens(rows, prompt, response), rows * (prompt + response))
        self.objective = Objective()
        with torch.no_grad():
            old = response_logps(model, self.packed).logps
        self.given = {"old_logps": old, "advantage": torch.linspace(-1.0, 0.5, rows)}
        self.totals = StepTotals(tokens=rows * response, rows=rows, kl_coeff=0.0)

    def __call__(self) -> float:
        """Return the loss, after its backward pass."""
        self.model.zero_grad(set_to_none=True)
        out = response_logps(self.model, self.packed)
        loss = self.objective.evaluate(self.given, out, self.totals).loss
        loss.backward()
        return float(loss.detach())


class TRLLoss:
    """Loss and backward of TRL's GRPOTrainer on the same model and tokens, without generation."""

    def __init__(self, model: Any, rows: int, prompt: int, response: int):
        import tempfile

        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        from rllib_gigpo.models import load_tokenizer

        args = GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=False,
            beta=0.0,
            per_device_train_batch_size=rows,
            num_generations=rows,
            max_completion_length=response,
            loss_type="dapo",
            gradient_checkpointing=False,
            report_to=[],
        )
        self.trainer: Any = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["x"] * rows}),
            processing_class=load_tokenizer(materialize(ModelSpec(MODEL))),
        )
        self.model = model
        model.train()
        self.trainer.current_gradient_accumulation_steps = 1
        prompts, responses = (
            torch.tensor(np.array(part)).long() for part in tokens(rows, prompt, response)
        )
        ids, mask = torch.cat([prompts, responses], 1), torch.ones(rows, prompt + response).long()
        with torch.no_grad():
            old, *_ = self.trainer._get_per_token_logps_and_entropies(model, ids, mask, response)
        self.inputs = {
            "prompt_ids": prompts,
            "prompt_mask": mask[:, :prompt],
            "completion_ids": responses,
            "completion_mask": mask[:, prompt:],
            "advantages": torch.linspace(-1.0, 0.5, rows),
            "old_per_token_logps": old,
            "num_items_in_batch": torch.tensor(rows * response),
        }

    def __call__(self) -> float:
        """Return the loss, after its backward pass."""
        self.model.zero_grad(set_to_none=True)
        loss = self.trainer.compute_loss(self.model, self.inputs)
        loss.backward()
        return float(loss.detach())


LOSSES: dict[str, Any] = {"ours": OurLoss, "trl": TRLLoss}


def bf16_model() -> Any:
    """Return SmolLM2 in bf16."""
    return load_causal_lm(materialize(ModelSpec(MODEL)), dtype=torch.bfloat16).eval()


def trl(rows: int, prompt: int, response: int, repeats: int) -> dict[str, Any]:
    """Loss and backward of both on one model, in turns, and the losses."""
    model = bf16_model()
    both = {name: make(model, rows, prompt, response) for name, make in LOSSES.items()}
    losses = {name: work() for name, work in both.items()}
    seconds = in_turns(both, repeats)
    return {**seconds, "losses": losses, "tokens": rows * (prompt + response)}


def loss_memory(what: str, rows: int, prompt: int, response: int) -> dict[str, Any]:
    """Peak of one of both, in a process of its own."""
    work = LOSSES[what](bf16_model(), rows, prompt, response)
    work()
    work()
    return {"peak": peak()}


def memory(sequence: int, rows: int, activation_checkpointing: bool) -> dict[str, Any]:
    """Peak that two updates of a learner add to the process, and what the estimate said."""
    response = sequence // 4
    settings = config(
        sequence - response,
        response,
        rows * sequence,
        activation_checkpointing=activation_checkpointing,
    )
    # An import that the learner makes later is no memory of the model's.
    _ = transformers.LlamaForCausalLM
    before = resident()
    learner = build(settings)
    # The second step is the first that has the optimizer's state beside the activations.
    for iteration in range(2):
        # Two micro-batches: the second has the gradients of the first beside its activations.
        rows_of = batch(2 * rows, sequence - response, response)
        learner.update(
            batch=rows_of.as_multi_agent(),
            timesteps={"num_env_steps_sampled_lifetime": 0},
            iteration=iteration,
        )
    architecture = transformers.AutoConfig.from_pretrained(
        materialize(ModelSpec(MODEL)), trust_remote_code=False
    )
    expected = estimate(architecture, plan_of(settings))["update"]
    return {"peak": peak() - before, "estimate": sum(expected.values()) / _GIB}


def peak() -> float:
    """Peak of the resident memory so far, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB


def resident() -> float:
    """Resident memory now, GiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / _GIB


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "floor": floor,
    "trl": trl,
    "loss_memory": loss_memory,
    "memory": memory,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    print(json.dumps(PARTS[asked.pop("part")](**asked)))
