"""A local Hugging Face hub, which can hang, truncate files, or lack a repository."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c0ffee" + "0" * 34


class FakeHub(ThreadingHTTPServer):
    """Repositories of the owner "team", each with the adapter or the model of a folder.

    Attributes:
      repos: name -> folder.
      hangs: names whose requests get no response before `close`.
      halves: names whose weights are truncated.
      gated: names whose files need the token "secret".
      requested: paths of all requests.
    """

    daemon_threads = True

    def __init__(self, repos: dict[str, Path]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos, self.hangs, self.halves, self.gated = repos, set(), set(), set()
        self.requested, self.closing = [], threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self):
        self.closing.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        self.server.requested.append(self.path)
        path = self.path.partition("?")[0].split("/")
        api = path[1:3] == ["api", "models"]
        owner, repo, *rest = [*path[3 if api else 1 :], "", ""]
        folder = self.server.repos.get(repo)
        if repo in self.server.hangs:
            self.server.closing.wait()
            self.close_connection = True
        elif owner != "team" or folder is None:
            self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
        elif rest[0] in ("revision", "tree", "resolve") and rest[1] not in ("main", "v1", COMMIT):
            self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
        elif api:
            found = listing(folder) if rest[0] == "tree" else {"id": f"team/{repo}", "sha": COMMIT, "siblings": []}
            if rest[0] == "revision":  # older clients read the names from there
                found["siblings"] = [{"rfilename": one["path"]} for one in listing(folder)]
            self.send(200, json.dumps(found).encode(), {"Content-Type": "application/json"}, body)
        elif repo in self.server.gated and self.headers.get("Authorization") != "Bearer secret":
            self.send(403, b"{}", {"X-Error-Code": "GatedRepo"}, body)
        else:
            file = folder.joinpath(*rest[2:])  # after resolve/REVISION
            if not file.is_file():
                return self.send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, body)
            half = repo in self.server.halves and file.suffix == ".safetensors"
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag(file)}"'}
            self.send(200, file.read_bytes(), headers, body, half)
        return None

    def send(self, status, content, headers, body, half=False):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content[: len(content) // 2] if half else content)
        self.close_connection = half


def etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


def listing(folder: Path) -> list[dict]:
    """The files of a repository, as the hub's API lists them."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    paths = [{"type": "file", "path": str(file.relative_to(folder))} for file in files]
    return [path | {"size": file.stat().st_size, "oid": etag(file)} for path, file in zip(paths, files, strict=True)]
