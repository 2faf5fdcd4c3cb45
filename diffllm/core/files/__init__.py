"""Files that are whole or not there, locks between processes, and paths that users give."""

from diffllm.core.files.locks import acquire, hold, holder, locked, missing, take_back
from diffllm.core.files.paths import check_absent, check_length, user_path, why_no_file
from diffllm.core.files.reading import (
    check_plain,
    made,
    open_regular,
    parse_json,
    read_bytes,
    read_json,
    read_lines,
    read_text,
    read_typed,
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
    "check_absent",
    "check_length",
    "check_plain",
    "hold",
    "holder",
    "locked",
    "made",
    "missing",
    "new_directory",
    "open_regular",
    "open_to_append",
    "open_to_write",
    "parse_json",
    "publish",
    "read_bytes",
    "read_json",
    "read_lines",
    "read_text",
    "read_typed",
    "readable",
    "replace_file",
    "scratch_directory",
    "sync",
    "take_back",
    "user_path",
    "why_no_file",
    "write_atomic",
]
