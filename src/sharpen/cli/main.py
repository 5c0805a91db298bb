"""The `sharpen` command.

In: the command line. Out: an exit code: 0 the requested work was done, 1 it failed or the answer is no, 2 bad input,
130 interrupted (by Ctrl-C, or by SIGTERM while a run is open). Each command imports what it needs when it runs, so that
`sharpen --help` is fast.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sharpen import __version__
from sharpen.cli.algorithms import add_algorithms, run_algorithms
from sharpen.cli.arguments import take_default_config
from sharpen.cli.certify import add_certify, run_certify
from sharpen.cli.compare import add_compare, run_compare
from sharpen.cli.diagnose import add_diagnose, run_diagnose
from sharpen.cli.doctor.command import add_doctor, run_doctor
from sharpen.cli.explain import add_explain, run_explain
from sharpen.cli.export import add_export, run_export
from sharpen.cli.init import add_init, run_init
from sharpen.cli.judge import add_judge, run_judge
from sharpen.cli.list_runs import add_ls, run_ls
from sharpen.cli.models import add_models, run_models
from sharpen.cli.plan import add_plan, run_plan
from sharpen.cli.record import add_record, run_record
from sharpen.cli.report import add_report, run_report
from sharpen.cli.rescore import add_rescore, run_rescore
from sharpen.cli.seeds import add_seeds, run_seeds
from sharpen.cli.serve import add_serve, run_serve
from sharpen.cli.show import add_show, run_show
from sharpen.cli.sweep import add_sweep, run_sweep
from sharpen.cli.training import add_check, add_eval, add_run_command, run_check, run_eval, run_run
from sharpen.cli.view import add_view, run_view
from sharpen.config.functions import reading_runs
from sharpen.errors import INVALID_INPUT, SharpenError
from sharpen.show.monitor.stream import open_missing_streams

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
END_S = 30.0
"""How long threads of the agent's code may go on after the last line."""
_WRONG_PATH = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
    *(errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP),
}
"""Errors of the system that say that a path which the user named is none to read or write there."""
Run = Callable[[argparse.Namespace], int]
OTHER_WORDS = {"train": "run", "tune": "run", "test": "check", "evaluate": "eval", "list": "ls", "runs": "ls"}
OTHER_WORDS |= {"verify": "certify", "dashboard": "view", "chat": "serve", "new": "init"}
"""What people call commands that have another name."""
_NO_COMMAND = re.compile(r"argument COMMAND: invalid choice: '([^']*)'")


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its line in `sharpen --help`, its arguments, and what it does."""

    help: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Run


COMMANDS: Mapping[str, Command] = {
    "init": Command("write a folder to start from: agent, judge, tasks, settings, a test", add_init, run_init),
    "doctor": Command("is this machine ready? what is here, a tiny step, what to do", add_doctor, run_doctor),
    "run": Command("train, from a configuration file", add_run_command, run_run),
    "check": Command("send a few tasks through agent and judge, before any training", add_check, run_check),
    "eval": Command("evaluate a model or an OpenAI-compatible endpoint on a dataset", add_eval, run_eval),
    "seeds": Command("train with several seeds: means with intervals over them", add_seeds, run_seeds),
    "sweep": Command("search the settings with which a run gains most, by Optuna", add_sweep, run_sweep),
    "plan": Command("predict the memory of a run before anything starts", add_plan, run_plan),
    "explain": Command("print every setting and where its value comes from", add_explain, run_explain),
    "algorithms": Command("list the algorithms with formulas, defaults and sources", add_algorithms, run_algorithms),
    "models": Command("which models can be served and trained, and whether one can", add_models, run_models),
    "ls": Command("list the runs with their results", add_ls, run_ls),
    "show": Command("print rollouts of a run, token by token if asked", add_show, run_show),
    "view": Command("look at runs in a browser: curves, tasks, rollouts token by token", add_view, run_view),
    "compare": Command("which run is better on the tasks that both have, and what differs", add_compare, run_compare),
    "report": Command("write the report of a run: one page to send, or Markdown", add_report, run_report),
    "rescore": Command("another judge over stored rollouts: what would have changed", add_rescore, run_rescore),
    "judge": Command("a judge against its owner's marks, and the marks: check, label", add_judge, run_judge),
    "diagnose": Command("why is the reward (or the loss) flat? causes, with evidence", add_diagnose, run_diagnose),
    "certify": Command("recompute the certificate of a run from its records", add_certify, run_certify),
    "serve": Command("serve a model to applications, in OpenAI's and Anthropic's protocols", add_serve, run_serve),
    "record": Command("forward calls to another server and record them, token by token", add_record, run_record),
    "export": Command("write what was recorded as rows for SFT or DPO", add_export, run_export),
}


READERS = {"ls", "show", "view", "compare", "report", "rescore", "diagnose", "certify", "export"}
"""Commands that read runs, also of others: no code that a run names is loaded."""


def main(argv: Sequence[str] | None = None, commands: Mapping[str, Run] | None = None) -> int:
    """Run one command and return its exit code. Our own errors are printed as one message to stderr."""
    open_missing_streams()
    parser = build_parser()
    _complete(parser)
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return BAD_INPUT
    try:
        take_default_config(arguments)
        _prepare_imports(arguments)
        run = COMMANDS[arguments.command].run if commands is None else commands[arguments.command]
        with reading_runs() if arguments.command in READERS else contextlib.nullcontext():
            code = run(arguments)
        sys.stdout.flush()  # here, where a reader that has gone is no error
        return code
    except KeyboardInterrupt:
        _print_error("sharpen: interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output (`| head`) has ended; discard the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except SharpenError as error:
        _print_error("\n".join([*getattr(error, "__notes__", ()), f"sharpen: {error}"]))
        return BAD_INPUT if isinstance(error, INVALID_INPUT) else FAILED
    except OSError as error:
        if not _is_named(error, arguments):
            raise
        _print_error(f"sharpen: {error.strerror}: {os.fspath(error.filename)}")
        return BAD_INPUT


def entry() -> int:
    """Run `main`. A thread that the agent's code has left running does not keep the process alive for ever."""
    code = main()
    threading.Thread(target=_end_anyway, args=(code,), name="sharpen-end", daemon=True).start()
    return code


def _end_anyway(code: int) -> None:
    """End the process, if such threads have not ended after a while. Without any, it is what was registered for the
    end that takes its time, as a service's upload may."""
    time.sleep(END_S)
    names = [one.name for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
    if not names:
        return
    with contextlib.suppress(OSError, ValueError):  # the reader has gone, or it was closed
        sys.stdout.flush()
    _print_error(f"sharpen: ended without these threads, which the agent's code left running: {', '.join(names)}")
    os._exit(code)


def _is_named(error: OSError, arguments: argparse.Namespace) -> bool:
    """Whether an argument names the path that an error is about, or one below it: all others are not the user's, and
    need their traceback."""
    if error.errno not in _WRONG_PATH or not isinstance(error.filename, str | os.PathLike):
        return False
    path = Path(error.filename).absolute()
    values = [one for value in vars(arguments).values() for one in (value if isinstance(value, list) else [value])]
    named = [Path(one).absolute() for one in values if isinstance(one, str | Path)]
    return any(path == one or path in one.parents for one in named)


def _complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell, if it asks for completions (by argcomplete, where that is installed), and end."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)


def _prepare_imports(arguments: argparse.Namespace) -> None:
    """Do what `--trinity-imports` and `--plugin-dir` ask for, in the commands that have them."""
    folders = getattr(arguments, "plugin_dir", None) or []
    if hasattr(arguments, "plugin_dir") and not folders:  # where Trinity-RFT has them
        folders = [Path(folder) for folder in os.environ.get("TRINITY_PLUGIN_DIRS", "").split(os.pathsep) if folder]
    if getattr(arguments, "trinity_imports", False) or folders:
        from sharpen.compat.trinity.imports.stand_in import load_plugins, stand_in

        stand_in(shadow=arguments.trinity_imports)
        for folder in folders:
            load_plugins(folder)


def _print_error(text: str) -> None:
    """Print to stderr, with control characters visible: the text may be a rollout's; and without secrets. If the reader
    has gone, the exit code stays the same."""
    from sharpen.agent.transcript import clean
    from sharpen.config.secrets import hide
    from sharpen.screen import shown
    from sharpen.show.monitor.stream import LastingStream

    stderr = LastingStream(sys.stderr)
    stderr.write(f"{shown(clean(hide(text)), stderr)}\n")
    stderr.flush()


class _Parser(argparse.ArgumentParser):
    """A parser that names the command which was meant."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and exit with 2."""
        if found := _NO_COMMAND.match(message):
            near = difflib.get_close_matches(found[1], [*COMMANDS, *OTHER_WORDS], n=1)
            meant = f"did you mean `sharpen {OTHER_WORDS.get(near[0], near[0])}`?" if near else "there are"
            message = f"there is no command {found[1]!r}; {meant} {'' if near else ', '.join(COMMANDS)}".rstrip()
        super().error(message)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = _Parser(prog="sharpen", description="Reinforcement learning for the model inside your agent.")
    parser.add_argument("--version", action="version", version=f"sharpen {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.add(subparsers.add_parser(name, help=command.help, description=command.help))
    return parser


if __name__ == "__main__":
    sys.exit(entry())
