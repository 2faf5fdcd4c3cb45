"""launch/jobset.yaml: the command of its pods, and consistent numbers."""

from pathlib import Path

import yaml
from runs.command import ROOT, command, success_of
from runs.json_files import read_json
from test_launch_torchrun import AWKWARD, RECORD, environment_with, fake

MANIFEST = ROOT / "launch" / "jobset.yaml"


def job_spec() -> dict:
    manifest = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))
    assert manifest["kind"] == "JobSet"
    (replicated,) = manifest["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"
    return replicated["template"]["spec"]


def container() -> dict:
    (only,) = job_spec()["template"]["spec"]["containers"]
    return only


def test_jobset_pod_passes_every_argument_to_torchrun(tmp_path: Path) -> None:
    pod = container()
    fake(tmp_path / "bin", "torchrun", RECORD)
    env = {entry["name"]: entry["value"] for entry in pod["env"]}
    seen = tmp_path / "seen.json"
    words = [*pod["command"], *pod["args"], *AWKWARD]
    success_of(command(words, ROOT, environment_with(tmp_path / "bin", SEEN=str(seen), **env)))
    heard = read_json(seen)
    given = heard[heard.index("train") + 1 :]
    assert given == [f"run.dir={env['RUN_DIR']}", *pod["args"], *AWKWARD]
    assert "--nnodes=2" in heard
    assert "--rdzv-endpoint=diffllm-node-0-0.diffllm:29400" in heard


def test_jobset_manifest_fields_are_consistent() -> None:
    job = job_spec()
    env = {entry["name"]: entry["value"] for entry in container()["env"]}
    assert job["completions"] == job["parallelism"] == int(env["NNODES"])
    name = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))["metadata"]["name"]
    assert env["RDZV_ENDPOINT"].partition(":")[0] == f"{name}-node-0-0.{name}"
    volumes = {volume["name"] for volume in job["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container()["volumeMounts"]} == volumes
    exit_codes = job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]
    assert exit_codes == [75]  # torchrun.sh exits with 75 after a stopped run.
