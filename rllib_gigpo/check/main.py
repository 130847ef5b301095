"""Checks a run before it costs GPU hours, on a CPU.

    rllib-gigpo check my_run.py:config
    rllib-gigpo check tuned_examples/alfworld_gigpo.py --model qwen2.5-7b --lora

Every fault of the settings at once, the environment's contract, the data, the model's chat template
and stop tokens, the lengths of prompts, the memory, and one real step on a two-layer copy of the
model. The exit status is 1 when something is at fault.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from rllib_gigpo_cli.parsers import check_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Check what the command line names and return the exit status."""
    parser = check_parser()
    args = parser.parse_args(arguments)
    from rllib_gigpo.check.findings import findings_text, is_sound
    from rllib_gigpo.check.loading import load_config
    from rllib_gigpo.check.run import check

    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        config = load_config(args.config, args.arguments)
    except ValueError as error:
        parser.error(str(error))
    print(f"checking {args.config} ...", flush=True)
    findings = check(
        config,
        one_step=not args.no_step,
        gpu_gib=args.gpu_gib,
        told=lambda name, found: print(f"  {name}: {found[-1].state}", flush=True),
    )
    print(f"\n{findings_text(findings)}")
    faults = sum(finding.state == "FAULT" for finding in findings)
    print(f"\n{faults} to mend before training" if faults else "\nready to train")
    return 0 if is_sound(findings) else 1


if __name__ == "__main__":
    sys.exit(main())
