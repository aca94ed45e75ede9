"""As much of W&B's server as a run's upload needs: who is logged in, runs and their histories.

It stands in for the real one in tests, with the library's own client talking to it; what the real server does beyond
this (permissions, limits, sampling) is not covered.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HISTORY, SUMMARY = "wandb-history.jsonl", "wandb-summary.json"


@dataclass
class StoredRun:
    """What the server knows of a run."""

    files: dict[str, list[str]] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)  # the last UpsertBucket
    exit_code: int | None = None

    @property
    def history(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.files.get(HISTORY, [])]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads(self.files[SUMMARY][-1])

    @property
    def config(self) -> dict[str, Any]:
        return {key: value["value"] for key, value in json.loads(self.fields["config"]).items()}


class WandbServer(ThreadingHTTPServer):
    """``runs`` by id; ``operations``: the GraphQL operations that were asked for; ``views``: saved workspaces by id."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.runs: dict[str, StoredRun] = {}
        self.operations: list[str] = []
        self.views: dict[str, dict[str, Any]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The data of a GraphQL answer."""
        self.operations.append(operation)
        if operation == "UpsertBucket":
            return {"upsertBucket": self._upsert(variables)}
        if operation == "RunResumeStatus":
            return {
                "model": {
                    "id": "p",
                    "name": "tagc",
                    "entity": {"id": "e", "name": "me"},
                    "bucket": self._status(variables["name"]),
                }
            }
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/upload"} for name in variables["files"]]
            return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}
        if operation == "UpsertView2":
            return {"upsertView": self._upsert_view(variables)}
        if operation == "ProjectViews":
            assert variables["viewType"] == "project-view"
            keys = ("id", "name", "displayName", "spec")
            edges = [{"node": {key: view[key] for key in keys}, "cursor": view["id"]} for view in self.views.values()]
            return {"project": {"allViews": {"edges": edges, "pageInfo": {"hasNextPage": False}}}}
        viewer = {
            "id": "u",
            "username": "me",
            "entity": "me",
            "email": "",
            "flags": "{}",
            "teams": {"edges": []},
            "apiKeys": {"edges": []},
        }
        return {"viewer": viewer, "serverInfo": {"features": [], "latestLocalVersionInfo": None}}

    def _upsert(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables["name"]
        inserted = name not in self.runs
        run = self.runs.setdefault(name, StoredRun())
        run.fields |= {key: value for key, value in variables.items() if value is not None}
        project = {"id": "p", "name": run.fields["project"], "entity": {"id": "e", "name": "me"}}
        bucket = {"id": "b", "name": name, "displayName": name, "description": None, "project": project}
        return {
            "bucket": bucket
            | {
                "sweepName": None,
                "config": run.fields.get("config", "{}"),
                "historyLineCount": len(run.files.get(HISTORY, [])),
            },
            "inserted": inserted,
        }

    def _upsert_view(self, variables: dict[str, Any]) -> dict[str, Any]:
        number = variables.get("id") or f"view{len(self.views)}"
        inserted = number not in self.views
        self.views[number] = variables | {"id": number}
        return {"view": {"id": number, "name": variables["name"]}, "inserted": inserted}

    def _status(self, name: str) -> dict[str, Any] | None:
        run = self.runs.get(name)
        if run is None:
            return None
        lines = run.files.get(HISTORY, [])
        return {
            "id": "b",
            "name": name,
            "summaryMetrics": (run.files.get(SUMMARY) or ["{}"])[-1],
            "displayName": name,
            "logLineCount": 0,
            "historyLineCount": len(lines),
            "eventsLineCount": 0,
            "historyTail": json.dumps(lines[-1:]),
            "eventsTail": "[]",
            "config": run.fields.get("config", "{}"),
            "tags": run.fields.get("tags") or [],
            "wandbConfig": '{"t": 1}',
        }

    def stream(self, name: str, body: dict[str, Any]) -> None:
        """One message of a run's file stream: lines at an offset replace what was there."""
        run = self.runs.setdefault(name, StoredRun())
        for file, chunk in (body.get("files") or {}).items():
            lines, offset = run.files.setdefault(file, []), chunk["offset"]
            lines[offset : offset + len(chunk["content"])] = chunk["content"]
        if body.get("complete"):
            run.exit_code = body.get("exitcode")


class _Handler(BaseHTTPRequestHandler):
    server: WandbServer

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answer: dict[str, Any] = {}
        if self.path.endswith("/graphql"):
            body = json.loads(text)
            found = re.search(r"(?:query|mutation)\s+(\w+)", body["query"])
            answer = {"data": self.server.answer(found[1] if found else "", body.get("variables") or {})}
        elif self.path.endswith("/file_stream"):
            self.server.stream(self.path.split("/")[-2], json.loads(text))
        self._send(answer)

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._send({})

    def _send(self, answer: dict[str, Any]) -> None:
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing on the terminal."""


@contextmanager
def serve_wandb() -> Iterator[WandbServer]:
    """A server on a free port of this machine. The library, which keeps the first one it talks to, starts afresh."""
    import wandb

    wandb.teardown()
    server = WandbServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        wandb.teardown()
        server.shutdown()
        server.server_close()
