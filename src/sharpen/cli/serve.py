"""`sharpen serve`: serve a model to applications over HTTP.

In: a model's folder, or a run's. Out: a server, until Ctrl-C or SIGTERM. The exit code is 0 if it ended when it was
told to, 1 if the engine failed, 2 for bad input, and 130 if it was interrupted before it served or while it ended.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from sharpen.errors import ConfigError

KEY_VARIABLE = "SHARPEN_API_KEY"


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", metavar="MODEL_DIR", help="a model's folder, a run's (its best checkpoint), or a name")
    parser.add_argument(
        "--host", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1, this machine only)"
    )
    parser.add_argument("--port", type=int, metavar="N", help="port (default: 8000; 0 is any free one)")
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"the key that clients send (default: ${KEY_VARIABLE}, or a new one, printed)"
    )
    parser.add_argument(
        "--name", metavar="NAME", help="the model's name for clients (default: the folder's, the run's)"
    )
    parser.add_argument("--max-model-len", type=int, metavar="N", help="most prompt plus sampled tokens of a request")
    parser.add_argument("--engine", choices=("auto", "embedded", "vllm"), help="what computes (default: auto)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="another setting of model, engine or gateway, e.g. model.temperature=0.7",
    )


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until told to end. Raises `ConfigError`, `ModelError` for bad input."""
    from sharpen.config.load import parse_assignments
    from sharpen.execution.threads import let_idle_workers_sleep

    key, line = _key(arguments.api_key)
    options: dict[str, Any] = {
        "gateway.host": arguments.host,
        "gateway.port": arguments.port,
        "model.max_model_len": arguments.max_model_len,
        "engine.type": arguments.engine,
    }
    given = parse_assignments(arguments.set) | {name: value for name, value in options.items() if value is not None}
    let_idle_workers_sleep()
    from sharpen.serve.model import find_model, serving_config
    from sharpen.serve.server import serve

    model = find_model(arguments.model)
    config = serving_config(model, given).config
    say(f"model: {model.folder}, sampled {model.origin} where a call does not say how")
    say(line)
    serve(config, name=arguments.name or model.name, key=key, say=say)
    return 0


def say(line: str) -> None:
    """Print a line at once, also into a file or a pipe."""
    print(line, flush=True)


def _key(given: str | None) -> tuple[str, str]:
    """Return the key of the server, and the line that says which it is; one that was given is not repeated."""
    key = os.environ.get(KEY_VARIABLE) if given is None else given
    if key is None:
        from sharpen.gateway.keys import new_key

        key = new_key()
        return key, f"key: {key}"
    if not key.strip() or not key.isascii() or not key.isprintable() or " " in key:
        where = f"the environment variable {KEY_VARIABLE}" if given is None else "--api-key"
        raise ConfigError(f"{where} is {key!r}: a key is made of printable ASCII characters without spaces")
    return key, "key: as given"
