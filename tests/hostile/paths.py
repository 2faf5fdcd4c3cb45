"""Paths that lead nowhere, as a command line may have them for a key or an argument.

Nothing but files is used, so that the same paths can be given to a command of any version.
"""

import os
import random
from pathlib import Path


def hostile_paths(place: Path) -> dict[str, str]:
    """Map words for each path to the path; what they go through is made in the directory `place`.

    None of them can be read or made, with one exception: root may enter every directory.
    """
    place.mkdir(parents=True, exist_ok=True)
    (place / "file").write_text("a file")
    for name, target in (("loop", "loop"), ("ring", "gnir"), ("gnir", "ring")):
        if not (place / name).is_symlink():
            (place / name).symlink_to(target)
    (place / "forbidden").mkdir(exist_ok=True)
    (place / "forbidden").chmod(0)
    found = {
        "an unknown user": "~nosuchuser/run",
        "an unknown user alone": "~nosuchuser",
        "a name that is too long": f"{place}/{'n' * 300}",
        "a name that is too long below what is missing": f"{place}/missing/{'n' * 300}/run",
        "characters of many bytes": f"{place}/{'ä' * 200}",
        "a path that is too long": f"{place}{'/name' * 1000}",
        "through a file": f"{place}/file/run",
        "through a loop": f"{place}/loop/run",
        "a loop": f"{place}/loop",
        "through a ring": f"{place}/ring/run",
        "bytes that are no text": f"{place}/\udcff",
    }
    if os.geteuid():
        found["a forbidden directory"] = f"{place}/forbidden/run"
    return found


def hostile_path(rng: random.Random, place: Path) -> tuple[str, str]:
    """Draw one: what it is in words, and the path."""
    return rng.choice(list(hostile_paths(place).items()))
