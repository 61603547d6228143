"""A W&B server that implements the requests of `wandb sync`. Writes the runs that it receives to the file named by its argument."""

import gzip
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

runs = {}
lock = threading.Lock()


def finite(text):
    return json.loads(text, parse_constant=str)


def run(name):
    return runs.setdefault(name, {"runs": [], "history": [], "summary": {}, "exit_codes": [], "files": {}})


def bucket(variables):
    project = {"id": "P", "name": variables["project"], "entity": {"id": "E", "name": variables.get("entity") or "me"}}
    shown = {"displayName": variables.get("displayName"), "description": None, "config": None, "sweepName": None}
    return {"id": "S", "name": variables["name"], "project": project, **shown}


def graphql(query, variables):
    if "upsertBucket" in query:
        run(variables["name"])["runs"].append({**variables, "config": finite(variables.get("config") or "{}")})
        return {"upsertBucket": {"bucket": {**bucket(variables), "historyLineCount": 0}, "inserted": True}}
    if "historyTail" in query:
        history = runs.get(variables["name"], {}).get("history")
        if not history:
            return {"model": {"id": "M", "name": variables["project"], "entity": None, "bucket": None}}
        lines = {"historyLineCount": len(history), "eventsLineCount": 0, "logLineCount": 0}
        tails = {"historyTail": json.dumps([json.dumps(history[-1])]), "eventsTail": "[]"}
        rest = {"summaryMetrics": "{}", "config": "{}", "tags": [], "notes": None, "wandbConfig": '{"t": 1}'}
        model = {"id": "M", "name": variables["project"], "entity": {"id": "E", "name": "me"}}
        return {"model": {**model, "bucket": {**bucket(variables), **lines, **tails, **rest}}}
    if "createRunFiles" in query:
        url = f"{address}/upload/{variables['run']}"
        files = [{"name": name, "uploadUrl": f"{url}/{name}"} for name in variables["files"]]
        return {"createRunFiles": {"runID": "S", "uploadHeaders": [], "files": files}}
    return {"serverInfo": {"features": [], "cliVersionInfo": None}, "viewer": None}


def file_stream(name, body):
    seen = run(name)
    files = body.get("files") or {}
    if rows := files.get("wandb-history.jsonl"):
        seen["history"][rows["offset"] :] = map(finite, rows["content"])
    if summary := files.get("wandb-summary.json"):
        seen["summary"] = finite(summary["content"][-1])
    if body.get("complete"):
        seen["exit_codes"].append(body["exitcode"])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def body(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def reply(self, value):
        body = json.dumps(value).encode()
        with lock, open(sys.argv[1] + ".tmp", "w") as file:
            json.dump(runs, file)
        os.replace(sys.argv[1] + ".tmp", sys.argv[1])
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.reply({})

    def do_PUT(self):
        _, _, name, file = self.path.split("/", 3)
        run(name)["files"][file] = self.body().decode()
        self.reply({})

    def do_POST(self):
        body = self.body()
        if self.path == "/graphql":
            request = json.loads(body)
            self.reply({"data": graphql(request["query"], request.get("variables") or {})})
        elif self.path.endswith("/file_stream"):
            file_stream(self.path.split("/")[-2], json.loads(body))
            self.reply({"exitcode": None, "limits": {}})
        else:
            self.reply({})


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.handle_error = lambda *_: None
address = f"http://127.0.0.1:{server.server_port}"
print(address, flush=True)
server.serve_forever()
