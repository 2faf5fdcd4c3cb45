"""diffllm plan [gpus=N] [gpu=NAME] [tokens=N] [overrides as for train.py] [--json]

Estimate memory, communication and time of a training run on a cluster. A simulated step without
data gives memory and communication. FLOP/s and bandwidths of the hardware give the time.

diffllm plan model=moe_30a3 attention=diff_v2 seq_len=4096 parallel.shard=64 parallel.expert=8 \\
    gpus=512 gpu=h200 tokens=1e12
"""

from dataclasses import dataclass

from diffllm.cli.arguments import CommandArguments, argument, parse
from diffllm.plan.cluster import Cluster


@dataclass
class PlanArguments(CommandArguments, Cluster):
    longest: bool = argument("also search the longest sequence that fits; slow", False)
    overrides: list[str] = argument("overrides of the config", [], words="overrides")


def plan_command(argv: list[str]) -> None:
    args = parse(PlanArguments, argv, __doc__)
    from diffllm.cli.plan_text import print_plan

    # The list of assumptions marks the values that the user set.
    named = set()
    for word in argv:
        key, _, _ = word.partition("=")
        named.add(key)
    print_plan(args, named, args.overrides, as_json=args.json, with_longest=args.longest)
