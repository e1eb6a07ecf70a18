"""A local Hugging Face hub, which can hang, truncate files, or lack a repository."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c0ffee" + "0" * 34


class FakeHub(ThreadingHTTPServer):
    """Repositories of the owner "team", each with the adapter of a folder.

    Attributes:
      repos: name -> folder.
      hangs: names whose requests get no response before `close`.
      halves: names whose weights are truncated.
      requested: paths of all requests.
    """

    daemon_threads = True

    def __init__(self, repos: dict[str, Path]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos, self.hangs, self.halves = repos, set(), set()
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
        owner, repo, *rest = [*path[1:], "", ""]
        if repo in self.server.hangs:
            self.server.closing.wait()
            self.close_connection = True
        elif owner != "team" or repo not in self.server.repos:
            self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
        else:
            file = self.server.repos[repo] / rest[2]  # after resolve/REVISION
            half = repo in self.server.halves and file.suffix == ".safetensors"
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag(file)}"'}
            self.send(200, file.read_bytes(), headers, body, half)

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
