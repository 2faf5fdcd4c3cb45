from pathlib import Path

import pytest
from runs.one_rank import gloo_group, trained_run


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with a checkpoint of step 3 and one line of metrics, for tests to copy."""
    path = tmp_path_factory.mktemp("trained")
    with gloo_group():
        trained_run(path, ["attention=standard"])
    (path / "metrics.jsonl").write_text('{"step": 3, "train/loss": 4.0}\n', encoding="utf-8")
    return path
