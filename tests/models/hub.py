"""A hub on loopback: the routes of the Hugging Face hub that its clients use to download a repository."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def open_hub(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Serves ``root/{models,datasets}/<owner>/<name>`` at one revision, ``main``. Yields the URL and the requests."""
    requests: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format, *args):  # noqa: A002
            pass

        def answer(self, status, body=b"", **headers):
            self.send_response(status)
            for name, value in {"Content-Length": len(body), "X-Repo-Commit": COMMIT, **headers}.items():
                self.send_header(name.replace("_", "-"), str(value))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_HEAD(self):
            self.do_GET()

        def do_POST(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.do_GET()

        def do_GET(self):
            path = unquote(urlsplit(self.path).path).strip("/")
            requests.append(f"{self.command} /{path}")
            parts = path.split("/")
            is_api = parts[0] == "api"
            parts = parts[1:] if is_api else parts
            kind = parts.pop(0) if parts[0] in {"models", "datasets"} else "models"
            folder = root / kind / "/".join(parts[:2])
            if len(parts) < 2 or not folder.is_dir():
                self.answer(404, X_Error_Code="RepoNotFound")
                return
            files = sorted(file for file in folder.rglob("*") if file.is_file())
            names = [str(file.relative_to(folder)) for file in files]
            if is_api and "tree" in parts:
                entries = [
                    {"type": "file", "path": name, "size": file.stat().st_size, "oid": digest(file)}
                    for name, file in zip(names, files, strict=True)
                ]
                self.answer(200, json.dumps(entries).encode(), Content_Type="application/json")
            elif is_api:
                if "revision" in parts and parts[parts.index("revision") + 1] not in {"main", COMMIT}:
                    self.answer(404, X_Error_Code="RevisionNotFound")
                    return
                siblings = [{"rfilename": name} for name in names]
                found = {"id": "/".join(parts[:2]), "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
                self.answer(200, json.dumps(found).encode(), Content_Type="application/json")
            else:
                file = folder / "/".join(parts[4:])
                if not file.is_file():
                    self.answer(404, X_Error_Code="EntryNotFound")
                    return
                self.answer(200, file.read_bytes(), ETag=f'"{digest(file)}"', Content_Type="application/octet-stream")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def digest(file: Path) -> str:
    """What names the content of a file."""
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()
