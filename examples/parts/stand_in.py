"""A stand-in for a model: an OpenAI-compatible endpoint on this machine, answered by a Python function.

Role: lets an example that needs a second model (a judge, a simulated user) run where there is none, and lets tests
script any model. In: a function from a request's messages to the reply. Out: the endpoint's base URL, while the context
lasts.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Message = Mapping[str, Any]
Reply = Callable[[Sequence[Message]], str | Message]
"""From the messages of a request to the text of the answer, or to a whole assistant message (with tool calls)."""


@contextlib.contextmanager
def stand_in(reply: Reply) -> Iterator[str]:
    """Serve chat completions whose answers are `reply(messages)`; gives the base URL (ending in `/v1`)."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body = json.dumps(completion(request, reply(request["messages"]))).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """No access log."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 256  # as many rollouts may call at once
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            server.shutdown()
            thread.join()


def completion(request: Mapping[str, Any], said: str | Message) -> dict[str, Any]:
    """The body of a chat completion. Tokens are counted as words: a stand-in has no tokenizer."""
    message = {"role": "assistant", "content": said} if isinstance(said, str) else {"role": "assistant", **said}
    words = sum(len(str(message.get("content") or "").split()) for message in request["messages"])
    answer_words = len(str(message.get("content") or "").split())
    return {
        "id": "chatcmpl-stand-in",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request["model"],
        "choices": [
            {"index": 0, "message": message, "finish_reason": "tool_calls" if message.get("tool_calls") else "stop"}
        ],
        "usage": {
            "prompt_tokens": words,
            "completion_tokens": answer_words,
            "total_tokens": words + answer_words,
        },
    }
