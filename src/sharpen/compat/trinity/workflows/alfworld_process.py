"""The process of a game of ALFWorld, used by `alfworld`.

In: lines of JSON, `{"open": FILE}` or `{"act": ACTION}`. Out: for each a line with `observation`, `reward` and `done`,
or with `error`. It ends when its input does.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any


def main() -> None:
    """Answer until the input ends."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever the packages print does not get among the replies
    game = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if "open" in question:
                close(game)
                game = opened(question["open"])
                state, reward, done = game.reset(), 0.0, False
            else:
                assert game is not None
                state, reward, done = game.step(question["act"])
            reply = {"observation": str(state.feedback), "reward": float(reward), "done": bool(done)}
        except Exception as error:  # whatever it is, it belongs to this game, whose rollout says it
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)
    os._exit(0)  # libraries that were unloaded have left exit handlers behind, which would crash


def opened(file: str) -> Any:
    """The game in that file, with names as ALFWorld shows them."""
    textworld = import_module("textworld")
    names = import_module("alfworld.agents.environment.alfred_tw_env").AlfredDemangler
    return textworld.start(file, textworld.EnvInfos(), wrappers=[names])


def close(game: Any) -> None:
    """Close the game and unload its planner: each game loads a copy (33 MB), which the package itself never does."""
    if game is None:
        return
    game.close()
    library = getattr(game.unwrapped, "downward_lib", None)
    if library is not None:
        import_module("fast_downward").close_lib(library)


if __name__ == "__main__":
    main()
