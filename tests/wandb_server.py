"""A stand-in for the server of wandb on 127.0.0.1, for the real client.

It answers the GraphQL queries that wandb's service sends for a run, and stores the lines of the
file stream as wandb's server does: a request with offset n replaces the lines from line n on. It
also stores the workspaces and reports that the package wandb-workspaces sends.
"""

import contextlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ENTITY = {"id": "1", "name": "team"}
HISTORY, EVENTS, SUMMARY = "wandb-history.jsonl", "wandb-events.jsonl", "wandb-summary.json"


@dataclass
class StoredRun:
    """A run as the server has received it."""

    project: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    """Variables of UpsertBucket, such as "groupName"; newer values replace older ones."""
    files: dict[str, list[str]] = field(default_factory=dict)
    """Lines of the file stream, by file name."""

    alerts: list[dict[str, Any]] = field(default_factory=list)
    """Variables of the alerts, such as "title"."""
    added_tags: list[str] = field(default_factory=list)
    """Tags that a user has added to the run in wandb."""
    uploads: dict[str, bytes] = field(default_factory=dict)
    """Uploaded files by path, such as "media/table/..."."""

    @property
    def history(self) -> list[dict[str, Any]]:
        """Logged lines; the key "_step" is wandb's step."""
        return [json.loads(line) for line in self.files.get(HISTORY, [])]

    @property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads(self.files[SUMMARY][0])) if SUMMARY in self.files else {}

    def bucket(self, name: str) -> dict[str, Any]:
        """Return the run in the format of GraphQL."""
        lines = self.files.get(HISTORY, [])
        counts = {
            f"{kind}LineCount": len(self.files.get(file, []))
            for kind, file in (("history", HISTORY), ("log", "output.log"), ("events", EVENTS))
        }  # fmt: skip
        return {
            "id": name, "name": name, "displayName": self.facts.get("displayName"),
            "config": self.facts.get("config") or "{}", "summaryMetrics": json.dumps(self.summary),
            "historyTail": json.dumps(lines[-1:]), "eventsTail": "[]", **counts,
            "tags": self.facts.get("tags"), "wandbConfig": json.dumps({"t": 1}),
            "project": {"id": "1", "name": self.project, "entity": ENTITY},
        }  # fmt: skip


class WandbServer:
    """The stand-in: `address` is a value for WANDB_BASE_URL, and `runs` holds runs by id.

    `views` holds the variables of UpsertView of each workspace and report, by id.
    """

    def __init__(self) -> None:
        self.runs: dict[str, StoredRun] = {}
        self.views: dict[str, dict[str, Any]] = {}
        self.away = False
        """Whether the server answers every request with status 503."""
        self.refusals: dict[str, tuple[int, str]] = {}
        """Status and message of refused requests, by GraphQL operation; or "file_stream"."""
        self.refused = 0
        """Number of requests that were answered with status 503."""
        handler = type("OwnRequests", (Requests,), {"owner": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.address = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def variables(self, home: Path) -> dict[str, str]:
        """Return the environment variables of clients; `home` is an empty home directory."""
        return {
            "WANDB_BASE_URL": self.address, "WANDB_API_KEY": "0123456789" * 4, "HOME": str(home),
            "WANDB_ERROR_REPORTING": "false",
        }  # fmt: skip

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Return the data of a GraphQL answer; {} for operations that a run does not need."""
        match operation:
            case "UpsertBucket":
                name, inserted = variables["name"], variables["name"] not in self.runs
                run = self.runs.setdefault(name, StoredRun(variables["project"]))
                run.facts |= {key: value for key, value in variables.items() if value is not None}
                return {"upsertBucket": {"bucket": run.bucket(name), "inserted": inserted}}
            case "RunResumeStatus":
                run, name = self.runs.get(variables["name"]), variables["name"]
                bucket = run.bucket(name) if run else None
                about = {"id": "1", "name": variables["project"], "entity": ENTITY}
                return {"model": {**about, "bucket": bucket}}
            case "Viewer":
                owner = {"entity": ENTITY["name"], "username": ENTITY["name"]}
                return {"viewer": {"id": "1", **owner, "flags": "{}", "teams": {"edges": []}}}
            case "ServerFeaturesQuery":
                return {"serverInfo": {"features": []}}
            case "CreateRunFiles":
                urls = {
                    name: f"{self.address}/{variables['run']}/{name}" for name in variables["files"]
                }
                files = [{"name": name, "uploadUrl": url} for name, url in urls.items()]
                answer = {"runID": variables["run"], "uploadHeaders": [], "files": files}
                return {"createRunFiles": answer}
            case "NotifyScriptableRunAlert":
                self.runs[variables["runName"]].alerts.append(variables)
                return {"notifyScriptableRunAlert": {"success": True}}
            case "Run":
                run = self.runs[variables["name"]]
                content = {**run.bucket(variables["name"]), "state": "running", "projectId": "1"}
                content |= {"systemMetrics": "{}", "historyKeys": None}
                content["tags"] = (content["tags"] or []) + run.added_tags
                return {"project": {"run": content}}
            case "ArtifactType":
                return {"project": None}
            case "CreateArtifact":
                # A committed artifact needs no upload; a table is also uploaded as a file.
                sequence = {"id": "1", "latestArtifact": None}
                artifact = {"id": "1", "state": "COMMITTED", "artifactSequence": sequence}
                return {"createArtifact": {"artifact": artifact}}
            case "GetDefaultEntity":
                return {"viewer": {"id": "1", "entity": ENTITY["name"]}}
            case "UpsertView2" | "upsertView":
                view_id = variables.get("id") or f"view{len(self.views)}"
                inserted = view_id not in self.views
                self.views[view_id] = variables
                stored = {key: variables[key] for key in ("name", "displayName", "spec")}
                project = {"id": "1", "name": variables["projectName"], "entityName": "team"}
                view = {"id": view_id, "description": "", "project": project, **stored}
                return {"upsertView": {"view": view, "inserted": inserted}}
            case "GetProjects":
                project = {
                    "id": "1", "name": "diffllm", "entityName": "team", "createdAt": "2026-01-01",
                    "isBenchmark": False, "user": None,
                }  # fmt: skip
                pages = {"hasNextPage": False, "endCursor": None}
                return {"models": {"edges": [{"node": project, "cursor": "1"}], "pageInfo": pages}}
        return {}

    def store(self, run: str, sent: dict[str, Any]) -> None:
        """Store a request of the file stream of a run."""
        for file, chunk in (sent.get("files") or {}).items():
            lines = self.runs[run].files.setdefault(file, [])
            lines[chunk["offset"] :] = chunk["content"]


class Requests(BaseHTTPRequestHandler):
    """Answers requests to the server `owner`."""

    owner: WandbServer
    protocol_version = "HTTP/1.1"
    lock = threading.Lock()

    def do_POST(self) -> None:
        sent = json.loads(self.body())
        operation = "file_stream"
        if self.path.endswith("/graphql"):
            operation = sent["query"].split("(")[0].split("{")[0].split()[-1]
        status, message = self.owner.refusals.get(operation, (200, ""))
        with self.lock:
            if message:
                found = {"errors": [{"message": message, "path": [operation]}], "data": None}
            elif operation != "file_stream":
                found = {"data": self.owner.answer(operation, sent.get("variables") or {})}
            else:
                if not self.owner.away:
                    self.owner.store(self.path.split("/")[-2], sent)
                found = {"exitcode": None, "limits": {}}
        self.reply(found, status)

    def do_PUT(self) -> None:
        _, run, path = self.path.split("/", 2)
        self.owner.runs[run].uploads[path] = self.body()
        self.reply({})

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def reply(self, content: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.owner.refused += self.owner.away
        self.send_response(503 if self.owner.away else status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # A killed client leaves its connections open.
            super().handle()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""
