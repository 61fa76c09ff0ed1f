"""A small Hugging Face hub on localhost: repositories are made, asked about, and committed to, over real HTTP."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_writer"


@dataclass
class Hub:
    """Its address, {repository: private?} and {repository: {file: content}}."""

    url: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """A hub that takes TOKEN, and refuses to let it write to repositories of `someone`."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def answer(self, status: int, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            repo = "/".join(self.path.split("?")[0].split("/")[3:5])
            if repo not in hub.private:
                return self.answer(404, {"error": "Repository not found"})
            return self.answer(200, {"id": repo, "private": hub.private[repo], "siblings": [], "sha": "0" * 40})

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.answer(401, {"error": "Invalid username or password."})
            if self.path == "/api/repos/create":
                asked = json.loads(content)
                repo = f"{asked['organization']}/{asked['name']}"
                if asked["organization"] == "someone":
                    return self.answer(403, {"error": "You don't have the rights to create a model there"})
                if repo in hub.private:
                    return self.answer(409, {"error": "exists", "url": f"{hub.url}/{repo}"})
                hub.private[repo] = asked.get("private", asked.get("visibility") == "private")
                return self.answer(200, {"url": f"{hub.url}/{repo}"})
            if self.path == "/api/validate-yaml":
                return self.answer(200, {"errors": [], "warnings": []})
            repo = "/".join(self.path.split("/")[3:5])
            if "/preupload/" in self.path:
                files = [
                    {**file, "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(content)["files"]
                ]
                return self.answer(200, {"files": files})
            for line in map(json.loads, content.splitlines()):
                if line["key"] == "file":
                    value = line["value"]
                    hub.files.setdefault(repo, {})[value["path"]] = base64.b64decode(value["content"])
            return self.answer(200, {"commitUrl": f"{hub.url}/{repo}/commit/{'0' * 40}", "commitOid": "0" * 40})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
