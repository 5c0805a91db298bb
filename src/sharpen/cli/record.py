"""`sharpen record`: forward calls to another server and record them; `sharpen record import`: what others recorded.

In: the server's URL, or files of other programs. Out: a recording, until Ctrl-C or SIGTERM, or of the files. The exit
code is 0 if it ended when it was told to, 1 if something could not be recorded, 2 for bad input.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from pathlib import Path

from sharpen.cli.arguments import add_json, print_json, say
from sharpen.cli.serve import IDLE_S, add_listening, own_key, seconds
from sharpen.errors import ConfigError

UPSTREAM_KEY_VARIABLE = "SHARPEN_UPSTREAM_KEY"
DEFAULT_PORT = 8001
FOLDER = "folder of the recording (default: record)"


def add_record(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--upstream", metavar="URL", help="base URL of the server, e.g. http://127.0.0.1:8000/v1")
    parser.add_argument("--dir", type=Path, default=Path("record"), metavar="DIR", help=FOLDER)
    parser.add_argument(
        "--idle-s", type=seconds, metavar="S", help=f"a session ends when idle so long (default: {IDLE_S:g})"
    )
    parser.add_argument("--model", metavar="MODEL_DIR", help="a model whose tokenizer shows tokens as text (show)")
    add_listening(parser, DEFAULT_PORT, "the recorder's own key, for sessions and feedback")
    actions = parser.add_subparsers(dest="action", metavar="import")
    _add_import(actions.add_parser("import", help="take what other programs recorded, from their files"))


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="files or folders of Harbor (ATIF), OpenTelemetry (OTLP JSON), Langfuse or LangSmith",
    )
    parser.add_argument("--dir", type=Path, default=argparse.SUPPRESS, metavar="DIR", help=FOLDER)
    parser.add_argument("--score", metavar="NAME", help="which of several scores is the reward")
    add_json(parser)


def run_record(arguments: argparse.Namespace) -> int:
    """Record until told to end, or import. Raises `ConfigError` for bad input."""
    from pydantic import ValidationError

    from sharpen.config.sections import GatewayConfig
    from sharpen.serve.record.server import Options, record
    from sharpen.serve.record.upstream import base_url

    if arguments.action == "import":
        return _import(arguments)
    if arguments.upstream is None:
        raise ConfigError("give the server whose calls are recorded (--upstream URL), or files: sharpen record import")
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
            idle_s=IDLE_S if arguments.idle_s is None else arguments.idle_s,
            model=arguments.model,
        ),
        say,
    )
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from sharpen.serve.interchange.files import read_files
    from sharpen.serve.interchange.sessions import keep, reward_of
    from sharpen.serve.record.rows import by_reward

    for name in ("upstream", "idle_s", "model", "host", "port", "api_key"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is for recording a server: nothing is served in an import")
    left_out: Counter[str] = Counter()
    sessions = read_files(arguments.files, left_out)
    if not sessions:
        raise ConfigError("; ".join(["the files have no call of a model that can be learnt from", *_lines(left_out)]))
    reward = reward_of(sessions, arguments.score)
    new = keep(sessions, arguments.dir, reward, left_out)
    rewards = Counter(session.scores.get(reward) if reward else None for session in new)
    calls = sum(len(session.calls) for session in new)
    if arguments.json:
        about = {"sessions": len(new), "calls": calls, "reward": reward, "dir": str(arguments.dir)}
        print_json({**about, "left_out": list(_lines(left_out))})
        return 0
    say(f"{len(new)} sessions with {calls} calls in {arguments.dir}")
    if new:
        say(f"sessions by reward{f' ({reward})' if reward else ''}: {by_reward(rewards)}")
    for line in _lines(left_out):
        say(line)
    return 0


def _lines(left_out: Counter[str]) -> list[str]:
    return [f"left out: {number} {what}" for what, number in left_out.items() if number]
