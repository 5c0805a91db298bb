"""`sharpen record`: forward calls to another server and record them.

In: the server's URL. Out: a recording, until Ctrl-C or SIGTERM. The exit code is 0 if it ended when it was told to, 1
if something could not be recorded, 2 for bad input.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from sharpen.cli.arguments import say
from sharpen.cli.serve import IDLE_S, add_listening, own_key, seconds
from sharpen.errors import ConfigError

UPSTREAM_KEY_VARIABLE = "SHARPEN_UPSTREAM_KEY"
DEFAULT_PORT = 8001


def add_record(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--upstream", required=True, metavar="URL", help="base URL of the server, e.g. http://127.0.0.1:8000/v1"
    )
    parser.add_argument(
        "--dir", type=Path, default=Path("record"), metavar="DIR", help="folder of the recording (default: record)"
    )
    parser.add_argument(
        "--idle-s", type=seconds, default=IDLE_S, metavar="S", help=f"a session ends when idle so long ({IDLE_S:g})"
    )
    parser.add_argument("--model", metavar="MODEL_DIR", help="a model whose tokenizer shows tokens as text (show)")
    add_listening(parser, DEFAULT_PORT, "the recorder's own key, for sessions and feedback")


def run_record(arguments: argparse.Namespace) -> int:
    """Record until told to end. Raises `ConfigError` for bad input."""
    from pydantic import ValidationError

    from sharpen.config.sections import GatewayConfig
    from sharpen.serve.record.server import Options, record
    from sharpen.serve.record.upstream import base_url

    try:
        listen = GatewayConfig(
            host=arguments.host or "127.0.0.1", port=DEFAULT_PORT if arguments.port is None else arguments.port
        )
    except ValidationError as error:
        problems = "; ".join(f"--{one['loc'][0]}: {one['msg']} (given: {one['input']!r})" for one in error.errors())
        raise ConfigError(problems) from error
    upstream = base_url(arguments.upstream)
    key, line = own_key(arguments.api_key)
    say(line)
    record(
        Options(
            upstream=upstream,
            upstream_key=os.environ.get(UPSTREAM_KEY_VARIABLE),
            folder=arguments.dir,
            key=key,
            listen=listen,
            idle_s=arguments.idle_s,
            model=arguments.model,
        ),
        say,
    )
    return 0
