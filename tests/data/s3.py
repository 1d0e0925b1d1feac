"""A real S3 server on this machine (moto's), which fails on request.

moto's own conditional writes are a check and then a write; here every request is answered alone, which makes
them one, as S3 promises.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import WSGIRequestHandler, make_server

from specdist.data.store.storage import StorePath, storage_path

BUCKET = "bucket"
# A request's method and path; what the server does instead of answering, or None.
Fault = Callable[[str, str], "Failure | None"]
ERROR = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>planted</Message></Error>"


class Failure:
    """``status``: of the answer; ``after_work``: the request is done all the same, and the answer lost;
    ``seconds``: the answer is late."""

    def __init__(
        self,
        status: int = 500,
        code: str = "InternalError",
        *,
        after_work: bool = False,
        seconds: float = 0.0,
    ) -> None:
        self.status, self.code, self.after_work, self.seconds = status, code, after_work, seconds


class Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *_: Any, **__: Any) -> None:
        pass


class S3Server:
    """``ignores_conditions``: as servers did before they had conditional writes."""

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self.fault: Fault = lambda method, path: None
        self.ignores_conditions = False
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        # Before the lock: a slow upload keeps nobody else waiting.
        if self.ignores_conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        environ["wsgi.input"] = io.BytesIO(_body(environ))
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        failure = self.fault(method, f"{path}?{environ.get('QUERY_STRING', '')}")
        if failure is not None:
            time.sleep(failure.seconds)
            if failure.after_work:
                with self._lock:
                    list(self._app(environ, lambda *_: lambda _: None))
            if failure.status != 200:
                start_response(f"{failure.status} Planted", [("Content-Type", "application/xml")])
                return [b"" if method == "HEAD" else ERROR % failure.code.encode()]
        with self._lock:
            return [b"".join(self._app(environ, start_response))]


def _body(environ: dict[str, Any]) -> bytes:
    if environ.get("HTTP_TRANSFER_ENCODING") == "chunked":
        return b"".join(iter(lambda: environ["wsgi.input"].read(2**16), b""))
    return environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """With an empty bucket."""
    server = S3Server()
    # File systems are kept for the next one of the same name, with the address of another server.
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    backend = s3_backends["123456789012"]["aws"]
    backend.reset()
    backend.create_bucket(BUCKET, "us-east-1")
    try:
        yield server
    finally:
        server.close()
        backend.reset()


def folder_of(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StorePath:
    """An empty folder in the bucket of a server without faults."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.fault, server.ignores_conditions = lambda method, path: None, False
    path = storage_path(f"s3://bucket/{tmp_path.name}", cache_dir=str(tmp_path / "cache"))
    assert isinstance(path, StorePath)
    return path
