"""Start wandb runs, write complete ones, and add advice to errors of wandb."""

import contextlib
import json
import netrc
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from diffllm.core.errors import ConfigError, UserError, printable
from diffllm.core.files import read_lines
from diffllm.core.printing import to_stderr
from diffllm.core.run_files import finite
from diffllm.metrics.table import COST_AXES, METRICS
from diffllm.metrics.wandb_directories import ONLINE_RUNS, sync_command

ONLINE_SECONDS = 20
"""Longest wait for the server's answer; after a longer wait the run is recorded offline."""
LONGEST_REASON = 200
HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
REMEDIES = {
    r"api.key|\b401\b|unauthorized|<no message>": "run `wandb login`, or set WANDB_API_KEY",
    r"previously created and deleted": "choose another project",
    r"permission denied|not found|does not exist|\b40[34]\b": "check the project and the entity",
    r"timed out|deadline|\bdial\b|connect|no such host|http 5":
        "check the network and WANDB_BASE_URL",
}  # fmt: skip
"""Advice by pattern of an error of wandb; the first match counts."""
UPLOAD_SETTINGS = {
    "x_disable_stats": True, "x_disable_meta": True, "x_save_requirements": False,
    "disable_git": True, "disable_code": True,
}  # fmt: skip
"""Settings that record nothing of this process and machine, because they did not train the run."""


def has_api_key() -> bool:
    """Return whether the environment or netrc has an API key for wandb's server."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    server = urlsplit(os.environ.get("WANDB_BASE_URL", "")).netloc
    with contextlib.suppress(OSError, ValueError, netrc.NetrcParseError):
        keys = netrc.netrc(os.environ.get("NETRC"))
        hosts = [server] if server else HOSTS
        return any(keys.authenticators(host) for host in hosts)
    return False


def new_id() -> str:
    return secrets.token_hex(4)


def create_run(mode: str, options: dict[str, Any], **settings: Any) -> Any:
    """Start a wandb run that receives no lines from elsewhere; arguments as in `open_run`.

    The run has the id options["id"]. If the server already has a run of this id, the run has a new
    id, because wandb appends to the lines on the server: it cannot replace lines.
    """
    if mode != "online":
        return open_run(mode, {**options, "resume": None}, **settings)
    options = {**options, "resume": "never"}
    try:
        return open_run(mode, options, **settings)
    except Exception as error:
        if "already exists" not in str(error):
            raise
    return open_run(mode, {**options, "id": new_id()}, **settings)


def open_run(mode: str, options: dict[str, Any], **settings: Any) -> Any:
    """Start a wandb run with `wandb.init(**options)`, and set the x-axis of each metric.

    `settings` are values of wandb.Settings.
    """
    import wandb

    # wandb prefers this variable to resume=None.
    resume_variable = os.environ.pop("WANDB_RESUME", None)
    # Without this call, wandb prompts for a missing API key.
    wandb.setup(wandb.Settings(silent=True))
    # run.log contains the output, and wandb would print next to the progress bar.
    all_settings = wandb.Settings(silent=True, console="off", **settings)
    if "WANDB_INIT_TIMEOUT" not in os.environ:
        all_settings.init_timeout = ONLINE_SECONDS
    place = Path(options["dir"])
    pattern = f"{ONLINE_RUNS}-{options['id']}"
    previous_starts = set(place.glob(pattern))
    try:
        run = wandb.init(mode=mode, settings=all_settings, **options)  # type: ignore[arg-type]
    except BaseException:
        # The service would reject the id as in use; some versions retry for a minute at a teardown.
        abandon_service()
        # The failed start leaves a directory, which `has_online` would take for an online run.
        for failed in set(place.glob(pattern)) - previous_starts:
            shutil.rmtree(failed, ignore_errors=True)
        raise
    finally:
        if resume_variable is not None:
            os.environ["WANDB_RESUME"] = resume_variable
    if run.resumed:
        # These values describe the last end of the run, such as a cancellation.
        run.summary.update({"state": None, "reason": None})
    for axis in COST_AXES:
        run.define_metric(axis, hidden=True)
    for metric in METRICS:
        if metric.name in COST_AXES:
            continue
        # wandb always keeps the last value; summary="last" would store it as <name>.last.
        kept_value = None if metric.summary == "last" else metric.summary
        run.define_metric(metric.name, step_metric="tokens", summary=kept_value)
    return run


def start(mode: str, options: dict[str, Any], offline_id: str) -> Any:
    """Start a wandb run with `open_run`, or with `create_run` if options["resume"] is None.

    If `mode` is "online" and the server refuses the run, record the run offline. An offline run has
    the id `offline_id`.
    """
    # `wandb sync` shifts the steps of an offline run that may be resumed.
    offline_options = {**options, "resume": None, "id": offline_id}
    if mode == "offline":
        return open_run(mode, offline_options)
    try:
        return open_run(mode, options) if options["resume"] else create_run(mode, options)
    except Exception as error:
        if mode != "online":
            raise
        command = sync_command(Path(options["dir"]), offline_id)
        to_stderr(
            f"wandb cannot go online, the run is recorded offline: {refusal_text(error)}; "
            f"`{command}` uploads the run"
        )
        return open_run("offline", offline_options)


def log_step(run: Any, values: dict[str, Any]) -> None:
    """Log the finite metrics of the training step values["step"]."""
    # wandb would store a NaN as the minimum of the metric in the run summary.
    metrics = {name: value for name, value in values.items() if finite(value) is not None}
    run.log(metrics, step=values["step"])


def refusal_text(error: Exception) -> str:
    """Return the first line of an error of wandb, with the advice of REMEDIES."""
    first_line = str(error).strip().split("\n")[0].rstrip(".")
    reason = printable(first_line)[:LONGEST_REASON] or repr(error)
    for pattern, remedy in REMEDIES.items():
        if re.search(pattern, reason, re.IGNORECASE):
            return f"{reason}; {remedy}"
    return reason


class Upload(NamedTuple):
    """A wandb run that `upload` has written."""

    id: str
    lines: int
    seconds: float
    url: str | None
    """Address of the run on the server; None for an offline run."""
    directory: str
    """Directory of the wandb run, such as <run directory>/wandb/offline-run-<time>-<id>."""


def upload(
    mode: str,
    options: dict[str, Any],
    lines: Iterable[dict[str, Any]],
    summary: dict[str, Any],
    exit_code: int = 0,
) -> Upload:
    """Write a complete wandb run, see `create_run`; return after the server has all lines.

    Raises ConfigError if the server refuses the run or a line.

    Args:
        mode: "online" or "offline".
        options: result of `init_options`.
        lines: metrics by step; a line whose step does not increase is skipped.
        summary, exit_code: as in WandbRun.
    """
    begin = time.monotonic()
    count = 0
    last_step = -1
    try:
        run = create_run(mode, options, **UPLOAD_SETTINGS)
        for values in lines:
            if values["step"] > last_step:
                log_step(run, values)
                count += 1
                last_step = values["step"]
        run.summary.update(summary)
        run.finish(exit_code=exit_code)
        directory = Path(run.dir).parent
        failure = failed_upload(directory)
        if failure:
            raise ConnectionError(failure)
    except (UserError, KeyboardInterrupt):
        # The service would wait for a server that does not answer.
        abandon_service()
        raise
    except Exception as error:
        tear_down()
        advice = ", or set mode=offline" if mode == "online" else ""
        raise ConfigError(
            f"wandb cannot store the run {options['name']}: {refusal_text(error)}{advice}"
        ) from error
    seconds = time.monotonic() - begin
    return Upload(run.id, count, seconds, None if run.offline else run.url, str(directory))


def failed_upload(place: Path) -> str | None:
    """Return why the server has not stored all lines of the wandb run in `place`, or None.

    wandb reports a refused line only in its log.
    """
    with contextlib.suppress(OSError, ValueError):
        for text in read_lines(place / "logs" / "debug-internal.log"):
            if "filestream: fatal error" in text:
                return str(json.loads(text)["msg"])
    return None


def tear_down() -> None:
    """Stop wandb's service process, and ignore any error.

    Without this call, wandb prints a traceback at exit if its service process has died.
    """
    with contextlib.suppress(Exception, SystemExit):
        import wandb

        wandb.teardown()


def abandon_service() -> None:
    """Kill wandb's service process, because wandb waits at exit for a service that hangs."""
    with contextlib.suppress(Exception):
        import wandb

        wandb.setup()._connection._proc._process.kill()  # type: ignore[union-attr]
    tear_down()
