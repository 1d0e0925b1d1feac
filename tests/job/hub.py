"""The hub's HTTP interface, as far as uploading a data set goes: huggingface_hub's own client talks to it."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_test"


class Hub(ThreadingHTTPServer):
    """``files``: of each repository, by path. ``num_failures``: requests that are answered with an error."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}
        self.commits: list[list[str]] = []
        self.refuses_commits = False


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        is_known = self.headers["authorization"] == f"Bearer {TOKEN}"
        self.answer({}, 200 if is_known and "/auth-check" in self.path else 403)

    def do_PUT(self) -> None:
        self.server.objects[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def do_POST(self) -> None:
        hub, path, body = self.server, self.path.split("?")[0], self.body()
        if self.headers["authorization"] != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid user token."}, 401)
        elif path == "/api/repos/create":
            asked = json.loads(body)
            assert asked["type"] == "dataset" and asked["visibility"] == "private"
            name = f"{asked['organization']}/{asked['name']}"
            known = name in hub.files
            hub.files.setdefault(name, {})
            self.answer({"url": f"{hub.endpoint}/datasets/{name}"}, 409 if known else 200)
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            found = [{"path": file["path"], "shouldIgnore": False,
                      "uploadMode": "regular" if file["path"].endswith(".md") else "lfs"}
                     for file in json.loads(body)["files"]]  # fmt: skip
            self.answer({"files": found})
        elif path.endswith("/info/lfs/objects/batch"):
            self.answer({"transfer": "basic", "objects": [
                {**asked, "actions": {"upload": {"href": f"{hub.endpoint}/lfs/{asked['oid']}"}}}
                for asked in json.loads(body)["objects"]]})  # fmt: skip
        elif "/commit/" in path and hub.refuses_commits:
            self.answer({"error": "no"}, 403)
        else:
            assert "/commit/" in path, path
            self.commit(path.split("/api/datasets/")[1].split("/commit/")[0], body)

    def commit(self, name: str, body: bytes) -> None:
        files = self.server.files[name]
        self.server.commits.append([])
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            if "path" in value:
                self.server.commits[-1].append(value["path"])
        url = f"{self.server.endpoint}/datasets/{name}/commit/1"
        self.answer({"commitUrl": url, "commitOid": "1" * 40})

    def body(self) -> bytes:
        if self.headers.get("transfer-encoding") == "chunked":
            content = b""
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def answer(self, document: dict[str, Any], status: int = 200) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def local_hub() -> Iterator[Hub]:
    hub = Hub()
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
