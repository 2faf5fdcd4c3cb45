"""A Hugging Face hub on this machine: one dataset repository, served from a directory."""

import hashlib
import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"
NAME = "someone/corpus"


class Hub(BaseHTTPRequestHandler):
    """Answers requests of `datasets` and `huggingface_hub` for a public dataset."""

    protocol_version = "HTTP/1.1"
    directory: Path
    hangs_at: str
    """Requests with this text in the path are never answered."""
    log: Path | None = None
    """Log file with one line per request."""

    def log_message(self, *_: Any) -> None:
        if self.log:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(f"{self.command} {self.path}\n")

    def do_GET(self) -> None:
        """Answer a request for metadata, or send a file."""
        if self.hangs_at in self.path:
            threading.Event().wait()
        path = urlsplit(self.path).path
        files = sorted(p for p in self.directory.rglob("*") if p.is_file())
        if match := re.fullmatch(rf"/api/(?:datasets|models)/{NAME}/tree/{SHA}/?(.*)", path):
            self.answer(
                [self.entry(each) for each in sorted((self.directory / match[1]).glob("*"))]
            )
        elif re.fullmatch(rf"/api/(?:datasets|models)/{NAME}(?:/revision/\w+)?", path):
            siblings = [{"rfilename": str(p.relative_to(self.directory))} for p in files]
            facts = {"id": NAME, "sha": SHA, "private": False, "gated": False, "disabled": False}
            self.answer({**facts, "tags": [], "downloads": 0, "likes": 0, "siblings": siblings})
        elif match := re.fullmatch(rf"(?:/datasets)?/{NAME}/resolve/{SHA}/(.*)", path):
            self.send_file(self.directory / match[1])
        else:
            self.answer({"error": "not found"}, 404)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Describe files."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if f"/api/datasets/{NAME}/paths-info/{SHA}" not in self.path:
            self.answer({"error": "not found"}, 404)
            return
        try:
            paths = json.loads(body)["paths"]
        except ValueError:
            paths = re.findall(r"paths=([^&]*)", body.decode())
        paths = [paths] if isinstance(paths, str) else paths
        found = [self.directory / path for path in paths]
        self.answer([self.entry(path) for path in found if path.exists()])

    def entry(self, path: Path) -> dict[str, Any]:
        """Describe a file as the hub does."""
        name = str(path.relative_to(self.directory))
        if path.is_dir():
            return {"type": "directory", "oid": "", "size": 0, "path": name}
        oid = hashlib.sha1(path.read_bytes()).hexdigest()
        return {"type": "file", "oid": oid, "size": path.stat().st_size, "path": name}

    def send_file(self, path: Path) -> None:
        if not path.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("X-Repo-Commit", SHA)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content, status = path.read_bytes(), 200
        size = len(content)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted:
            start, stop = int(wanted[1]), min(int(wanted[2] or size - 1), size - 1) + 1
            content, status = content[start:stop], 206
        self.send_response(status)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("ETag", f'"{hashlib.sha1(path.read_bytes()).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def answer(self, content: Any, status: int = 200) -> None:
        """Send JSON."""
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


if __name__ == "__main__":
    Hub.directory, Hub.hangs_at = Path(sys.argv[1]), sys.argv[2]
    Hub.log = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    print(server.server_port, flush=True)
    server.serve_forever()
