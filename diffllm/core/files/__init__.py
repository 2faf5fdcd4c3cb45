"""Files that are whole or not there, locks between processes, and paths that users give."""

from diffllm.core.files.locks import acquire, hold, holder, locked, missing, take_back
from diffllm.core.files.paths import user_path
from diffllm.core.files.reading import (
    parse_json,
    read_bytes,
    read_json,
    read_lines,
    read_text,
    readable,
)
from diffllm.core.files.writing import (
    build_once,
    new_directory,
    open_to_append,
    open_to_write,
    publish,
    replace_file,
    scratch_directory,
    sync,
    write_atomic,
)

__all__ = [
    "acquire",
    "build_once",
    "hold",
    "holder",
    "locked",
    "missing",
    "new_directory",
    "open_to_append",
    "open_to_write",
    "parse_json",
    "publish",
    "read_bytes",
    "read_json",
    "read_lines",
    "read_text",
    "readable",
    "replace_file",
    "scratch_directory",
    "sync",
    "take_back",
    "user_path",
    "write_atomic",
]
