"""The wandb runs that `diffllm wandb` has written online, by run directory."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from diffllm.core.files import read_json, write_atomic
from diffllm.core.run_files import RunFolder
from diffllm.metrics.wandb_config import RUN_ID, WandbConfig

UPLOADS = f"{RunFolder.WANDB}/uploads.json"
"""File in a run directory, which maps the address of the wandb run in run.json to the newest id.

run.json itself does not change, because only a start of the run may write it.
"""


def uploaded_id(run: Path, run_id: str, cfg: WandbConfig) -> str | None:
    """Return the id under which `diffllm wandb` has last written a run online; None if it has not.

    Args:
        run: run directory.
        run_id: id of the wandb run in run.json.
        cfg: result of `with_variables` or `with_recorded`, which contains the project.
    """
    newest_id = read_uploads(run).get(address(run_id, cfg))
    if isinstance(newest_id, str) and RUN_ID.fullmatch(newest_id):
        return newest_id
    return None


def store_uploaded_id(run: Path, run_id: str, cfg: WandbConfig, newest_id: str) -> None:
    """Store the result of later calls of `uploaded_id`; raises CheckpointError if this fails."""
    uploads = {**read_uploads(run), address(run_id, cfg): newest_id}
    write_atomic(run / UPLOADS, json.dumps(uploads, indent=2) + "\n", new_parents=1)


def read_uploads(run: Path) -> dict[str, Any]:
    # Without the file, a repair begins another wandb run.
    with suppress(OSError, ValueError):
        return read_json(run / UPLOADS)
    return {}


def address(run_id: str, cfg: WandbConfig) -> str:
    """Return server, entity, project and id of a wandb run; the default of a part is empty."""
    server = os.environ.get("WANDB_BASE_URL", "").rstrip("/")
    return "/".join((server, cfg.entity or "", cfg.project or "", run_id))
