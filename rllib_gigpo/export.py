"""A trained policy as a Hugging Face folder, for plain transformers, peft and vLLM.

    python -m rllib_gigpo.export CHECKPOINT OUTPUT [--kind full|merged|adapter]

RLlib checkpoints are Python pickles, and unpickling one runs whatever code its author put into it.
They are read by `rllib_gigpo.safe_pickle` instead, which runs none; only a policy of a class of
one's own needs `trust=True`. Ray is not started, and no environment is built.
"""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import ray.cloudpickle as pickle
import torch
import transformers
from ray.rllib.core import (
    COMPONENT_LEARNER,
    COMPONENT_LEARNER_GROUP,
    COMPONENT_RL_MODULE,
    DEFAULT_MODULE_ID,
)
from safetensors.torch import save_file

from rllib_gigpo import __version__, safe_pickle
from rllib_gigpo.checkpoints import CheckpointError, Place, check_inside, whole_folder
from rllib_gigpo.models import (
    ModelSpec,
    load_generation_config,
    materialize,
    model_class,
    without_progress_bars,
)
from rllib_gigpo.module import CausalLMModule
from rllib_gigpo_cli.parsers import export_parser

if TYPE_CHECKING:
    from rllib_gigpo.gigpo import GiGPO

Kind = Literal["full", "adapter", "merged"]
Dtype = Literal["float32", "bfloat16"]

_MODULES = Path(COMPONENT_LEARNER_GROUP, COMPONENT_LEARNER, COMPONENT_RL_MODULE)


class _Trained(NamedTuple):
    """What rebuilds a module without its algorithm; `state` is a folder or a module state."""

    module_class: type[CausalLMModule]
    settings: dict[str, Any]
    state: Path | dict[str, Any]


def export(
    source: str | Path | GiGPO,
    output: str | Path,
    kind: Kind = "full",
    module_id: str = DEFAULT_MODULE_ID,
    dtype: Dtype = "float32",
    *,
    base: str | None = None,
    trust: bool = False,
) -> Path:
    """Write a policy's weights, tokenizer, generation settings and model card into a folder.

    Args:
        source: A checkpoint folder (of `algorithm.save_to_path`, or a Tune trial's), or a running
            algorithm.
        output: Folder to write; it must be new or empty.
        kind: "full": all weights of a full fine-tune. "merged": base and LoRA adapter as one plain
            model. "adapter": a LoRA adapter for peft and vLLM; its adapter_config.json names the
            base model.
        module_id: Which policy, where several were trained.
        dtype: Type of the written weights; "bfloat16" is half as large and rounded.
        base: Folder or id of the base model, where it has moved since training.
        trust: Unpickle a checkpoint, which runs what its author put into it; needed for a module
            of another class than CausalLMModule.

    Returns:
        `output`.

    Raises:
        ValueError: A folder that is no checkpoint, an unknown policy, kind or dtype, a kind that
            this run did not train, or an output folder that holds files.
        CheckpointError: A file of the checkpoint is not what was written.
    """
    output = Path(output)
    _check(output, kind, dtype)
    if isinstance(source, str | Path):
        trained = _from_checkpoint(source, module_id, trust)
    else:
        trained = _from_algorithm(source, module_id)
    module = _rebuild(trained, base)
    _check_kind(kind, module, module_id)
    path = materialize(module.model_config["spec"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    with whole_folder(output) as folder:
        if kind == "adapter":
            _save_adapter(module, folder, getattr(torch, dtype))
        else:
            _save_model(module, path, folder, getattr(torch, dtype))
        tokenizer.save_pretrained(folder)
        if module.sight is not None:
            module.sight.processor.save_pretrained(folder)
        (folder / "README.md").write_text(_model_card(module, kind, dtype), encoding="utf-8")
    return output


def _check(output: Path, kind: str, dtype: str) -> None:
    for name, value, choices in (("kind", kind, Kind), ("dtype", dtype, Dtype)):
        if value not in get_args(choices):
            expected = ", ".join(map(repr, get_args(choices)))
            raise ValueError(f"{name}={value!r}: expected one of {expected}")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"output {str(output)!r} exists already: name a new or an empty folder")


def _check_kind(kind: Kind, module: CausalLMModule, module_id: str) -> None:
    if kind == "full" and module.lora is not None:
        raise ValueError(
            f"kind='full', but {module_id!r} trained a LoRA adapter on frozen weights: use "
            "kind='merged' for one plain model, or kind='adapter' for the adapter alone"
        )
    if kind != "full" and module.lora is None:
        raise ValueError(
            f"kind={kind!r}, but {module_id!r} trained all weights and has no adapter: use "
            "kind='full'"
        )


def module_ids(checkpoint: str | Path) -> list[str]:
    """Return the names of the policies in a checkpoint.

    Raises:
        ValueError: It is no checkpoint.
    """
    modules = Path(checkpoint) / _MODULES
    if not modules.is_dir():
        raise ValueError(
            f"{str(checkpoint)!r} is no checkpoint of GiGPO (it has no folder {_MODULES}): name "
            "the folder that algorithm.save_to_path(...) returned, or a Tune trial's checkpoint"
        )
    return sorted(path.name for path in modules.iterdir() if path.is_dir())


def _from_checkpoint(checkpoint: str | Path, module_id: str, trust: bool) -> _Trained:
    known = module_ids(checkpoint)
    if module_id not in known:
        raise ValueError(f"unknown module_id {module_id!r}: this checkpoint holds {known}")
    folder = Path(checkpoint) / _MODULES / module_id
    check_inside(Place.of(Path(checkpoint)), f"{_MODULES}/{module_id}")
    path = folder / CausalLMModule.CLASS_AND_CTOR_ARGS_FILE_NAME
    if not trust:
        return _without_code(folder, path)
    with path.open("rb") as file:
        built_by = pickle.load(file)
    return _Trained(built_by["class"], built_by["ctor_args_and_kwargs"][1], folder)


def _without_code(folder: Path, path: Path) -> _Trained:
    """Read a module of this package's own class, and its weights, from plain data alone."""
    try:
        built_by = safe_pickle.read(path)
        name = getattr(built_by["class"], "name", None)
        if name != f"{CausalLMModule.__module__}.{CausalLMModule.__name__}":
            raise safe_pickle.UntrustedPickleError(f"its module is a {name}")
        settings = built_by["ctor_args_and_kwargs"][1]
        safe_pickle.check_known("its settings", settings)
        weights = safe_pickle.read(folder / f"{CausalLMModule.STATE_FILE_NAME}.pkl")
        safe_pickle.check_known("its state", weights)
    except safe_pickle.UntrustedPickleError as error:
        raise ValueError(
            f"checkpoint {str(folder)!r} is not read, because that would run code ({error}): say "
            "--trust-checkpoint (in Python trust=True) if you trust its author"
        ) from error
    return _Trained(CausalLMModule, settings, weights)


def _from_algorithm(algorithm: GiGPO, module_id: str) -> _Trained:
    known = sorted(algorithm.config.module_ids)
    if module_id not in known:
        raise ValueError(f"unknown module_id {module_id!r}: this algorithm trains {known}")
    return algorithm.first_learner(partial(_trained, module_id=module_id))


def _trained(learner: Any, module_id: str) -> _Trained:
    module = learner.module[module_id].unwrapped()
    return _Trained(type(module), module.get_ctor_args_and_kwargs()[1], module.get_state())


def _rebuild(trained: _Trained, base: str | None) -> CausalLMModule:
    model_config = {**trained.settings["model_config"], "with_reference": False}
    if base is not None:
        model_config["spec"] = ModelSpec(base)
    module = trained.module_class(**{**trained.settings, "model_config": model_config})
    if isinstance(trained.state, Path):
        module.restore_from_path(trained.state.absolute())
    else:
        module.set_state(trained.state)
    return module


def _save_model(module: CausalLMModule, path: str, output: Path, dtype: torch.dtype) -> None:
    weights = {name: tensor.to(dtype) for name, tensor in module.policy_weights().items()}
    with torch.device("meta"):
        model = model_class(path).from_config(module.lm.config, dtype=dtype)
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.generation_config = load_generation_config(path)
    with without_progress_bars():
        model.save_pretrained(output)


def _save_adapter(module: CausalLMModule, output: Path, dtype: torch.dtype) -> None:
    tensors, config = module.adapter_weights()
    save_file(
        {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()},
        output / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    (output / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


_CONTENTS: dict[Kind, str] = {
    "full": "all weights",
    "merged": "the base model with its LoRA adapter merged in",
    "adapter": "a LoRA adapter",
}


def _model_card(module: CausalLMModule, kind: Kind, dtype: Dtype) -> str:
    name = module.model_config["spec"].name
    is_folder = Path(name).expanduser().is_dir()
    base = Path(name).name if is_folder else name
    on_hub = f"\nbase_model: {name}" if "/" in name and not is_folder else ""
    if kind == "adapter":
        library, loader = "peft", "AutoPeftModelForCausalLM"
        imports = f"from peft import {loader}\nfrom transformers import AutoTokenizer"
    else:
        library = "transformers"
        loader = "AutoModelForCausalLM" if module.sight is None else "AutoModelForImageTextToText"
        imports = f"from transformers import {loader}, AutoTokenizer"
    lora = module.lora
    return f"""---
library_name: {library}{on_hub}
tags: [reinforcement-learning, agent, gigpo, rllib-gigpo]
---

# {base}, trained with GiGPO

A language-model agent, trained by reinforcement learning (GiGPO, arXiv 2505.10978) with rllib-gigpo
{__version__}.

- Base model: {base}
- Contents: {_CONTENTS[kind]}, {dtype}
- Trained: {f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}" if lora else "all weights"}

```python
{imports}

model = {loader}.from_pretrained(FOLDER)
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
```
"""


def main(arguments: list[str] | None = None) -> None:
    """Export a checkpoint from the command line."""
    parser = export_parser()
    args = parser.parse_args(arguments)
    logging.getLogger("ray").setLevel(logging.ERROR)  # RLlib warns of its own deprecations
    try:
        folder = export(
            args.checkpoint,
            args.output,
            args.kind,
            args.module_id,
            args.dtype,
            base=args.base,
            trust=args.trust_checkpoint,
        )
    except (CheckpointError, ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{args.kind} model of {args.module_id} in {folder}")


if __name__ == "__main__":
    main()
