"""An external grader over HTTP, standard library only: `python examples/rewards/http_server.py 50071`.

Then `reward: {backend: http, endpoint: "http://127.0.0.1:50071/score"}` in the run's config.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ExactMatch(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections open between requests

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"results": [grade(item) for item in request["items"]]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


def grade(item: dict[str, Any]) -> dict[str, Any]:
    if not item["ground_truth"]:
        return {"error": "this item has no ground truth"}
    exact = float(item["response"].strip() == item["ground_truth"])
    return {"score": exact, "parts": {"length": len(item["response"])}}


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 50071), ExactMatch)
    print(f"listening on port {server.server_address[1]}", flush=True)
    server.serve_forever()
