"""Drawn values that end in divergence, in a refusal, or well after all.

Only public command lines are used. `started` and `problems` of outputs.py start and judge a case.
"""

import random

from hostile.outputs import TINY, Drawn

DIVERGING = (
    ("optim.lr=100", "optim.clip_norm=0"),
    ("optim.lr=1e20",),
    ("optim.lr=1e6", "optim.clip_norm=0", "optim.weight_decay=0"),
    ("optim.lr=1e18", "optim.schedule=wsd"),
)
"""With train.skip_step=off no loss is finite soon."""
SHAPES = (
    ("model=tiny", "attention=standard"), ("model=tiny", "attention=diff_v1"),
    ("model=tiny", "attention=diff_v2"), ("model=tiny", "attention=gated"), ("model=moe_tiny",),
)  # fmt: skip
REFUSED = (
    "optim.lr={huge}", "optim.lr=-{huge}", "optim.lr=nan", "optim.lr=inf", "optim.lr=0",
    "optim.beta1={huge}", "optim.beta2=1", "optim.eps=0", "optim.eps=1e-300",
    "optim.weight_decay=-1", "optim.weight_decay={huge}", "optim.clip_norm=nan",
    "optim.min_lr_ratio={huge}", "optim.decay_fraction=-{small}", "optim.warmup_steps={integer}",
    "steps=0", "steps=-{integer}", "steps={integer}0000", "eval.sequences=0", "eval.tokens=0",
    "checkpoint.interval=-1", "train.max_consecutive_skips=0", "seed={integer}{integer}",
    "model.dim=0", "model.n_layers=-1", "seq_len=0", "global_batch_size=-{integer}",
    "distributed.timeout=0", "run.name={long}", "run.sweep={long}", "run.name=.hidden",
    "wandb.project=${{oc.env:PATH}}", "data.vocab_size=-1",
)  # fmt: skip
TOOLS_REFUSED = (
    ("plan", "model=tiny", "gpus={integer}"), ("plan", "model=tiny", "gpus=-1"),
    ("plan", "model=tiny", "reserve_gib=1e300"), ("plan", "model=tiny", "mfu=2"),
    ("generate", "run=outputs/none", "prompt=a", "temperature=-{small}"),
    ("generate", "run=outputs/none", "prompt=a", "temperature=nan"),
    ("generate", "run=outputs/none", "prompt=a", "temperature=inf"),
    ("generate", "run=outputs/none", "prompt=a", "top_p=-{small}"),
    ("generate", "run=outputs/none", "prompt=a", "top_p={huge}"),
    ("generate", "run=outputs/none", "prompt=a", "max_new_tokens=-{integer}"),
    ("generate", "run=outputs/none", "prompt=a", "seed={integer}{integer}"),
    ("noise-floor", "nonsense={integer}"), ("report", "outputs/none"), ("nonsense",),
)  # fmt: skip
LEGAL = (
    "optim.beta1=0", "optim.beta2=0", "optim.eps=1", "optim.weight_decay=0", "optim.clip_norm=0",
    "optim.min_lr_ratio=0", "optim.min_lr_ratio=1", "optim.warmup_steps=0", "optim.schedule=wsd",
    "optim.decay_fraction=1", "train.skip_step=spike", "train.skip_step=off", "eval.interval=1",
    "checkpoint.interval=1", "optim.lr=1e-30", "precision=fp32",
)  # fmt: skip


def numbers(rng: random.Random) -> dict[str, str]:
    """Draw the numbers and the name that fill in the values above."""
    return {
        "huge": f"{rng.uniform(1, 9):.2f}e{rng.randint(39, 307)}",
        "small": f"{rng.uniform(0.01, 0.99):.3f}",
        "integer": str(rng.randint(10**9, 10**12)),
        "long": "n" * rng.randint(256, 3000),
    }


def draw(rng: random.Random) -> Drawn:
    """Draw a run that diverges, one that is refused, or one at the edge of what is allowed."""
    kind = rng.choice(("diverged", "refused", "refused", "tool", "finished"))
    fill = numbers(rng)
    words = ["train", *TINY, "run.report=false"]
    if kind == "tool":
        tool = rng.choice(TOOLS_REFUSED)
        return Drawn(tuple(word.format(**fill) for word in tool), expected="refused")
    if kind == "refused":
        wrong = rng.choice(REFUSED).format(**fill)
        return Drawn((*words, "steps=3", wrong), expected="refused")
    if kind == "finished":
        legal = rng.sample(LEGAL, rng.randint(1, 4))
        legal = [w for i, w in enumerate(legal) if w.split("=")[0] not in
                 [other.split("=")[0] for other in legal[:i]]]  # fmt: skip
        return Drawn((*words, f"steps={rng.randint(1, 5)}", *legal, "run.name=r"),
                     runs=("outputs/r",))  # fmt: skip
    words += [*rng.choice(SHAPES), *rng.choice(DIVERGING), f"steps={rng.randint(4, 12)}"]
    words += [f"eval.interval={rng.choice((2, 1000))}", "optim.warmup_steps=0"]
    words += ["train.skip_step=off", "run.name=r"]
    if rng.random() < 0.3:
        words = ["train", "-m", *words[1:-1], "seed=0,1", "run.sweep=s"]
        words = [word for word in words if not word.startswith("run.name=")]
        runs: tuple[str, ...] = ("outputs/s/seed0", "outputs/s/seed1")
        return Drawn(tuple(words), expected="diverged", runs=runs)
    return Drawn(tuple(words), expected="diverged", runs=("outputs/r",))
