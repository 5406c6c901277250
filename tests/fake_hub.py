"""A small Hub on this machine, and the fixtures that let huggingface_hub talk to it."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


class FakeHub:
    """Serves folders as repositories; `status[repo]` answers with an error instead, `seen` lists the requests.

    A repository in `readers` is private: it answers only to the token there.
    """

    sha = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self):
        self.repos: dict[str, dict[str, bytes]] = {}
        self.status: dict[str, tuple[int, str]] = {}
        self.seen: list[str] = []
        self.tokens: set[tuple[str, str]] = set()
        self.readers: dict[str, str] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.answer(self)

            do_HEAD = do_GET

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def add(self, repo: str, folder: Path, **extra: bytes) -> None:
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.repos[repo] = files | extra

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.split("?")[0].strip("/")
        if path:
            self.seen.append(path)
            self.tokens.add((path.split("/")[0], request.headers.get("Authorization", "")))
        parts = path.removeprefix("api/models/").split("/")
        repo = "/".join(parts[:2])
        if not path:
            self.reply(request, 200, b"")
        elif repo in self.status:
            code, name = self.status[repo]
            self.reply(request, code, b"{}", {"X-Error-Code": name} if name else {})
        elif repo not in self.repos or not self.may_read(repo, request.headers.get("Authorization", "")):
            self.reply(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif "lost" in parts:
            self.reply(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith("api/models/") and "tree" in parts:
            self.reply(request, 200, json.dumps([self.entry(repo, name) for name in self.repos[repo]]).encode())
        elif path.startswith("api/models/"):
            names = [{"rfilename": name} for name in self.repos[repo]]
            self.reply(request, 200, json.dumps({"id": repo, "sha": self.sha, "siblings": names}).encode())
        else:
            content = self.repos[repo]["/".join(parts[4:])]
            etag = hashlib.sha1(content).hexdigest()
            self.reply(request, 200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": self.sha})

    def may_read(self, repo: str, authorization: str) -> bool:
        return repo not in self.readers or authorization == f"Bearer {self.readers[repo]}"

    def entry(self, repo: str, name: str) -> dict:
        content = self.repos[repo][name]
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    @staticmethod
    def reply(request: BaseHTTPRequestHandler, code: int, body: bytes, headers: dict | None = None) -> None:
        request.send_response(code)
        for key, value in (headers or {}).items():
            request.send_header(key, value)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)


@pytest.fixture
def online(monkeypatch, tmp_path):
    """Let huggingface_hub talk, to an endpoint that the test sets, with an empty cache and no stored token."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return monkeypatch


@pytest.fixture
def fake(online):
    served = FakeHub()
    online.setenv("HF_ENDPOINT", served.url)
    yield served
    served.server.shutdown()
    served.server.server_close()
