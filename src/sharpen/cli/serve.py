"""`sharpen serve`: serve a model to applications over HTTP; with `--config` it also learns from its use.

In: a model's folder, a run's, or a configuration. Out: a server, until Ctrl-C or SIGTERM. The exit code is 0 if it
ended when it was told to, 1 if the engine or the trainer failed, 2 for bad input, and 130 if it was interrupted before
it served or while it ended.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sharpen.cli.arguments import add_root, add_set, model_of, say
from sharpen.errors import ConfigError

KEY_VARIABLE = "SHARPEN_API_KEY"
IDLE_S = 600.0
_NO_DATASET = "train_dataset.path"


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "model",
        metavar="MODEL_DIR",
        nargs="?",
        help="a model's folder, a run's or its name (its best checkpoint), or a name of the hub",
    )
    add_root(parser)
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="instead: serve the model of this configuration, and learn"
    )
    parser.add_argument(
        "--idle-s", type=seconds, metavar="S", help=f"with --config: a session ends when idle so long ({IDLE_S:g})"
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="a LoRA adapter of this model (a run, a checkpoint, a folder of peft's), served beside it by that name; "
        "repeatable",
    )
    add_listening(parser, 8000)
    parser.add_argument(
        "--name", metavar="NAME", help="the model's name for clients (default: the folder's, the run's)"
    )
    parser.add_argument("--max-model-len", type=int, metavar="N", help="most prompt plus sampled tokens of a request")
    parser.add_argument("--engine", help="what computes: auto (the default), embedded, vllm, or one of your own")
    add_set(parser, "model.temperature=0.7 (of model, engine or gateway)")


def add_listening(parser: argparse.ArgumentParser, port: int, key: str = "the key that clients send") -> None:
    """Add where a server listens, at `port` unless it is told, and its key, by what it is for."""
    parser.add_argument(
        "--host", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1, this machine only)"
    )
    parser.add_argument("--port", type=int, metavar="N", help=f"port (default: {port}; 0 is any free one)")
    parser.add_argument("--api-key", metavar="KEY", help=f"{key} (default: ${KEY_VARIABLE}, or a new one, printed)")


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until told to end. Raises `ConfigError`, `ModelError` for bad input."""
    from sharpen.config.load import parse_assignments
    from sharpen.machine import let_idle_workers_sleep

    if (arguments.model is None) == (arguments.config is None):
        raise ConfigError("give either MODEL_DIR, to serve a model, or --config FILE, to serve one that learns")
    if arguments.config is None and arguments.idle_s is not None:
        raise ConfigError("--idle-s belongs to --config, which was not given: nothing else has sessions")
    if arguments.config is not None and arguments.adapter:
        raise ConfigError(
            "--adapter belongs to a model that is served as it is: with --config one set of weights learns"
        )
    key, line = own_key(arguments.api_key)
    options: dict[str, Any] = {
        "gateway.host": arguments.host,
        "gateway.port": arguments.port,
        "model.max_model_len": arguments.max_model_len,
        "engine.type": arguments.engine,
    }
    given = parse_assignments(arguments.set) | {name: value for name, value in options.items() if value is not None}
    let_idle_workers_sleep()
    if arguments.config is not None:
        _serve_and_learn(arguments, given, key, line)
        return 0
    from sharpen.serve.model import find_model, serving_config
    from sharpen.serve.server import serve

    model = find_model(model_of(arguments, arguments.model))
    config = serving_config(model, given).config
    say(f"model: {model.folder}, sampled {model.origin} where a call does not say how")
    say(line)
    adapters = [_adapter(arguments, given) for given in arguments.adapter]
    serve(config, name=arguments.name or model.name, key=key, say=say, adapters=adapters)
    return 0


def _adapter(arguments: argparse.Namespace, given: str) -> tuple[str, Path]:
    """Return the name and the folder of an adapter. Raises `ConfigError` if it is not `NAME=PATH`, `ModelError` if
    there is none."""
    from sharpen.models.adapter_files import CONFIG
    from sharpen.serve.adapters import adapter_folder

    name, _, path = given.partition("=")
    if not name.strip() or not path:
        raise ConfigError(f"--adapter {given}: it is given as NAME=PATH")
    folder = Path(path).expanduser()
    return name, folder if (folder / CONFIG).is_file() else adapter_folder(path, Path(model_of(arguments, path)))


def _serve_and_learn(arguments: argparse.Namespace, given: Mapping[str, Any], key: str, line: str) -> None:
    from sharpen.compat.files import load_config
    from sharpen.config.load import resolve
    from sharpen.serve.learning import Options, serve_and_learn
    from sharpen.serve.model import DEFAULT_PORT

    file = load_config(arguments.config)
    settings = dict(given)
    if "path" not in (file.settings.get("train_dataset") or {}) and _NO_DATASET not in settings:
        settings[_NO_DATASET] = "sessions"  # there are no tasks to read
    started_here = settings.get("mode", file.settings.get("mode", "both")) == "both"
    assigned = [part for name, value in settings.items() for part in ("--set", f"{name}={_yaml(value)}")]
    trainer = ["--config", str(arguments.config), *assigned, "--set", "mode=train"] if started_here else None
    if "port" not in (file.settings.get("gateway") or {}):
        settings.setdefault("gateway.port", DEFAULT_PORT)
    resolved = resolve(file, {**settings, "mode": "explore"})
    say(line)
    options = Options(
        name=arguments.name or str(resolved.config.name),
        key=key,
        idle_s=IDLE_S if arguments.idle_s is None else arguments.idle_s,
        trainer=trainer,
    )
    serve_and_learn(resolved, options, say, arguments.config)


def _yaml(value: Any) -> str:
    """Return a setting as it can be given on a command line: JSON is YAML."""
    return json.dumps(value)


def seconds(text: str) -> float:
    """Read a number of seconds."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be more than 0 seconds, got {text}")
    return value


def own_key(given: str | None) -> tuple[str, str]:
    """Return the key of the server, and the line that says which it is; one that was given is not repeated."""
    key = os.environ.get(KEY_VARIABLE) if given is None else given
    if key is None:
        from sharpen.gateway.caller import new_key

        key = new_key()
        return key, f"key: {key}"
    if not key.strip() or not key.isascii() or not key.isprintable() or " " in key:
        where = f"the environment variable {KEY_VARIABLE}" if given is None else "--api-key"
        raise ConfigError(f"{where} is {key!r}: a key is made of printable ASCII characters without spaces")
    return key, "key: as given"
