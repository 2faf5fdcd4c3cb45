"""diffllm dashboard entity=... project=... [--offline]: a wandb view that compares variants."""

from dataclasses import dataclass, field
from pathlib import Path

from diffllm.cli.arguments import a_path, parse, plugins_field
from diffllm.core.errors import ConfigError
from diffllm.core.files import replace_file
from diffllm.core.printing import echo
from diffllm.metrics.wandb_run import WandbConfig, as_json, resolve_mode, workspace

WHAT = """\
diffllm dashboard entity=... project=... [--offline]: a saved view of a wandb project, with loss,
spikes, norms, outliers and lambda over tokens, runs grouped by attention variant

  --offline   write the view to out= instead of saving it; so does WANDB_MODE=offline, or no API key
"""


@dataclass
class Arguments:
    """The arguments of `diffllm dashboard`."""

    entity: str = field(metadata={"help": "wandb user or team"})
    project: str = field(metadata={"help": "wandb project"})
    name: str = field(default="Attention variants", metadata={"help": "of the view"})
    out: str = field(default="dashboard.json", metadata=a_path("file it goes to when offline"))
    plugins: str = plugins_field()

    def __post_init__(self) -> None:
        for key in ("entity", "project", "name", "out"):
            if not getattr(self, key).strip():
                raise ConfigError(f"{key}= must not be empty")


def main(argv: list[str]) -> None:
    """Save the view and print its address, or write it to a file."""
    args = parse(Arguments, [word for word in argv if word != "--offline"], WHAT)
    try:
        view = workspace(args.entity, args.project, args.name)
    except ImportError as error:
        raise ConfigError(
            f'{error.name or error} is not installed: pip install "diffllm[dashboard]"'
        ) from None
    except ValueError:  # the only value that is checked
        raise ConfigError(
            f"name={args.name} cannot be used: wandb takes no emoji and no symbols such as = or +"
        ) from None
    if "--offline" in argv or resolve_mode(WandbConfig()) != "online":
        try:
            replace_file(Path(args.out), as_json(view) + "\n")
        except OSError as error:
            raise ConfigError(f"out={args.out} cannot be written: {error.strerror}") from None
        echo(f"offline; the view is in {args.out}")
        return
    try:
        view.save()
        echo(view.url)
    except Exception as error:  # wandb's own, its client's, or its network library's
        why = " ".join(str(error).split())
        raise ConfigError(
            f"wandb did not save the view to {args.entity}/{args.project}: {why}"
        ) from error
