"""Keys and passwords from the environment appear in no file and in no output."""

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest
from runs.command import (
    clean_environment,
    command,
    documents,
    tool_command,
    train_command,
    write_texts,
)

from diffllm.config import load_config
from diffllm.core.errors import ConfigError
from diffllm.core.secrets import command_text

SECRETS = {
    "WANDB_API_KEY": "5ec2e7" + "0123456789abcdef" * 2 + "ab",
    "HF_TOKEN": "hf_VerySecretTokenOfNobody012345678901",
    "HUGGING_FACE_HUB_TOKEN": "hf_AnotherSecretTokenOfNobody0123456",
}
PASSWORD = "pr0xyPassw0rdOfNobody"


def closed_port() -> int:
    """Return a port of this machine that refuses connections."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.fixture
def secret_environment(tmp_path):
    """Return variables with secrets, a closed proxy with a password, and closed servers."""
    proxy = f"http://user:{PASSWORD}@127.0.0.1:{closed_port()}"
    (tmp_path / "home").mkdir()
    kept = {k: v for k, v in clean_environment(tmp_path / "cache").items() if k != "WANDB_MODE"}
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
    return {
        **{name: value for name, value in kept.items() if not name.startswith(("HF_", "WANDB_"))},
        **SECRETS,
        **dict.fromkeys(names, proxy),
        "HOME": str(tmp_path / "home"),
        "WANDB_BASE_URL": f"http://127.0.0.1:{closed_port()}",
        "HF_ENDPOINT": f"http://127.0.0.1:{closed_port()}",
    }


@pytest.fixture
def training_words(tmp_path):
    corpus = write_texts(tmp_path / "corpus.jsonl", documents(60))
    return [
        *("model=tiny", "model.vocab_size=512", "data=files", f"data.paths=[{corpus}]"),
        *("seq_len=32", "global_batch_size=2", "steps=2", "optim.warmup_steps=1"),
        *("log_interval=1", "eval.sequences=2", "checkpoint.interval=2"),
    ]


def leaks(directory: Path) -> list[str]:
    """Return the files that contain a secret."""
    secrets = [value.encode() for value in (*SECRETS.values(), PASSWORD)]
    return [
        str(path)
        for path in directory.rglob("*")
        if path.is_file() and any(secret in path.read_bytes() for secret in secrets)
    ]


def output_without_secrets(words: list[str], cwd: Path, env: Mapping[str, str], code: int) -> str:
    """Return a command's output; assert that output and files below `cwd` contain no secret."""
    done = command(words, cwd, env)
    assert done.code == code, done.err
    text = done.out + done.err
    assert not [value for value in (*SECRETS.values(), PASSWORD) if value in text]
    assert leaks(cwd) == []
    return text


@pytest.mark.slow
def test_unreachable_wandb_server_leaks_no_secret(tmp_path, secret_environment, training_words):
    """The message about the refused connection must not contain the key."""
    online = train_command([*training_words, "wandb.mode=online", "run.name=a"])
    assert "wandb cannot go online" in output_without_secrets(
        online, tmp_path, secret_environment, 0
    )


@pytest.mark.slow
def test_unreachable_hub_dataset_leaks_no_secret(tmp_path, secret_environment, training_words):
    hub = [word for word in training_words if not word.startswith("data")]
    hub = train_command([*hub, "data=hub", "data.dataset=nobody/nothing", "run.name=a"])
    output = output_without_secrets(hub, tmp_path, secret_environment, 2)
    begun, waits, error = output.splitlines()
    assert begun == "run outputs/a: preparing data"
    assert waits.startswith("waiting for the hub")
    assert error.startswith("error: data.dataset=nobody/nothing cannot be read: ")


@pytest.mark.slow
def test_sweep_and_report_commands_leak_no_secret(tmp_path, secret_environment, training_words):
    swept = train_command(["-m", *training_words, "seed=0,1", "run.sweep=s", "wandb.mode=offline"])
    output_without_secrets(swept, tmp_path, secret_environment, 0)
    assert len(list(tmp_path.glob("outputs/s/*/wandb/offline-run-*/*.wandb"))) == 2
    output_without_secrets(tool_command(["report", "outputs/s"]), tmp_path, secret_environment, 0)
    assert (tmp_path / "outputs" / "s" / "report.html").is_file()
    (tmp_path / "a.wandb").write_bytes(b"\0x" + SECRETS["HF_TOKEN"].encode() + b"\xff")
    assert leaks(tmp_path) == [str(tmp_path / "a.wandb")], "leaks() must find a planted secret"


SECRET = SECRETS["WANDB_API_KEY"]


@pytest.mark.parametrize(
    ("word", "key"),
    [
        (f"wandb.api_key={SECRET}", "wandb.api_key"),
        (f"+wandb.key={SECRET}", "wandb.key"),
        (f"wandb.apikey={SECRET}[", "wandb.apikey"),
        (f"+data.hf_token={SECRET}", "data.hf_token"),
        (f"HF_TOKEN={SECRET}", "HF_TOKEN"),
        (f"+password={SECRET}", "password"),
        (f"wandb={{mode: offline, api_key: {SECRET}}}", "wandb"),
    ],
)
def test_override_error_omits_secret_value(word, key):
    with pytest.raises(ConfigError, match=r"set secrets in the environment") as caught:
        load_config(["model=tiny", word])
    assert str(caught.value).startswith(f"{key}: ")
    assert "WANDB_API_KEY, HF_TOKEN" in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("words", [["-m", "seed=0,1"], []])
def test_train_command_leaks_no_secret_from_overrides(tmp_path, secret_environment, words):
    given = train_command([*words, f"wandb.api_key={SECRET}"])
    output = output_without_secrets(given, tmp_path, secret_environment, 2)
    assert output.startswith("error: wandb.api_key: set secrets in the environment")


def test_config_keys_similar_to_secret_names_are_accepted():
    words = ["data.tokenizer=token.model", "data.tokenizer_sample_bytes=7", "data.eos_token=end"]
    cfg = load_config(words)
    assert (cfg.data.tokenizer, cfg.data.tokenizer_sample_bytes) == ("token.model", 7)
    assert command_text(words) == " ".join(words)
    cfg = load_config(["data.sample_prompt='the secret: key=3, token: 4'"])
    assert json.dumps(cfg.data.sample_prompt) == '"the secret: key=3, token: 4"'
    assert os.environ.get("WANDB_API_KEY") != SECRET


@pytest.mark.parametrize("key", ["wandb.project", "run.name", "data.cache_dir", "seed"])
def test_override_that_reads_environment_variable_is_refused(key: str, monkeypatch) -> None:
    """The value could be a secret, and would appear in config.yaml or in an error."""
    monkeypatch.setenv("SOME_NAME", SECRET)
    with pytest.raises(ConfigError, match="interpolation is not allowed") as caught:
        load_config(["model=tiny", f"{key}=${{oc.env:SOME_NAME}}"])
    assert SECRET not in str(caught.value)
