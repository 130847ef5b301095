"""Continue a prompt with plain vLLM, in a process of its own.

    python plain_vllm.py '{"prompt": [...], "max_tokens": 8, "folders": [...], "adapters": {...}}'

Prints one JSON line: for each folder, and each adapter on its base folder, the token ids and their
log-probabilities.
"""

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["TORCHDYNAMO_DISABLE"] = "1"

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def load(folder: str, **settings) -> LLM:
    return LLM(
        folder,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=2,
        block_size=32,
        kv_cache_memory_bytes=8 << 20,
        enforce_eager=True,
        distributed_executor_backend="uni",
        **settings,
    )


def continued(llm: LLM, task: dict, adapter: str | None = None) -> dict:
    sampling = SamplingParams(
        temperature=0.0, max_tokens=task["max_tokens"], logprobs=0, ignore_eos=True
    )
    request = LoRARequest("exported", 1, adapter) if adapter else None
    (output,) = llm.generate(
        {"prompt_token_ids": task["prompt"]}, sampling, use_tqdm=False, lora_request=request
    )
    said = output.outputs[0]
    logps = [step[token].logprob for token, step in zip(said.token_ids, said.logprobs, strict=True)]
    return {"token_ids": list(said.token_ids), "logps": logps}


def main() -> None:
    task = json.loads(sys.argv[1])
    found = {folder: continued(load(folder), task) for folder in task["folders"]}
    for adapter, base in task["adapters"].items():
        llm = load(base, enable_lora=True, max_lora_rank=8)
        found[adapter] = continued(llm, task, adapter)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
