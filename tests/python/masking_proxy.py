"""Adds sampling masks to the replies of a real vLLM on a CPU, which returns them on GPUs only. engines.rs starts it.

python masking_proxy.py PORT http://127.0.0.1:VLLM

Every request is passed on. A request to /inference/v1/generate also asks for the log-probabilities of its top_k tokens. The ids that
vLLM's sampler kept are those with a probability; the other parts of the reply stay as they are.
"""

import http.client
import json
import sys
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SERVER = urllib.parse.urlsplit(sys.argv[2]).netloc


NONE = -9999.0  # vLLM's log-probability of a token that cannot be drawn


def kept(token):
    return [other["token_id"] for other in token["top_logprobs"] if other["logprob"] > NONE]


def add_masks(reply):
    for choice in reply["choices"]:
        choice["sampling_mask"] = [kept(token) for token in choice["logprobs"]["content"]]


class Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        is_generate = self.path == "/inference/v1/generate"
        if is_generate:
            request = json.loads(body)
            request["sampling_params"]["logprobs"] = request["sampling_params"]["top_k"]
            body = json.dumps(request).encode()
        server = http.client.HTTPConnection(SERVER, timeout=300)
        server.request(self.command, self.path, body, {"Content-Type": "application/json"})
        answer = server.getresponse()
        reply = answer.read()
        if answer.status == 200 and is_generate:
            found = json.loads(reply)
            add_masks(found)
            reply = json.dumps(found).encode()
        if self.path.startswith("/server_info"):
            found = json.loads(reply)
            assert found["vllm_config"]["model_config"]["return_sampling_mask"] is False, "a real vLLM without masks"
            found["vllm_config"]["model_config"]["return_sampling_mask"] = True
            reply = json.dumps(found).encode()
        self.send_response(answer.status)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    do_POST = do_GET

    def log_message(self, *_):
        pass


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Proxy).serve_forever()
