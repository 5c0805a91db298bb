"""Which of Trinity-RFT's own example files load here, and which run unchanged to the second step.

    python tests/as_it_is/trinity_table.py [NAME ...]

In: the facts of its files (`trinity/`), rewritten by `rewrite.py`. Out: a table between two marks of
`docs/use/trinity-yaml.md`; with names, lines on the terminal for the files that have them in their path. A file runs
unchanged if it trains two steps (or evaluates) with paths and sizes changed by `--set` alone: a toy model, toy rows.
"""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import os
import re
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import worlds
from judge import REPLIES, write_judge

from sharpen.cli.main import main
from sharpen.compat.files import load_config
from sharpen.compat.trinity.registry import check_names
from sharpen.config.load import resolve
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError
from sharpen.learning.algorithm.supervised import learns_from_rows

FOLDER = Path(__file__).parent / "trinity"
PAGE = Path(__file__).parents[2] / "docs/use/trinity-yaml.md"
BEGIN, END = "<!-- made by tests/as_it_is/trinity_table.py -->", "<!-- until here -->"
STAND_INS = Path(__file__).parent / "stand_ins"
FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.yaml"))
_VARIABLE = re.compile(r"\$\{oc\.env:([A-Z_a-z0-9]+)\}")
_SIZES = {
    "model.max_model_len": 4096,
    "model.max_tokens": 24,
    "algorithm.batch_size": 2,
    "evaluation.max_tasks": 2,
    "check.num_tasks": 2,
}
_CONVERSATION = [{"role": "user", "content": "6 + 1 = ?"}, {"role": "assistant", "content": "7"}]
_CALLS = {"raw_system": "", "tools": "[]", "conversations": [{"from": "human", "value": "?"}], "answer": "[]"}
_LAKE = {"size": 3, "p": 0.8, "seed": 1}
_BOTS = {"prompt": _CONVERSATION[:1], "reward_model": {"ground_truth": "7"}}
_BOTS_MODULE = "examples.bots.workflow.bots_math_boxed_workflow"
_ROWS: Mapping[str, Mapping[str, Any]] = {
    "countdown_reward": {"response": {"numbers": [1, 2, 3], "target": 6}},
    "email_search_workflow": {"inbox_address": "ann@x.com", "query_date": "2001-05-02", "message_ids": ["<a>"]},
    "frozen_lake_workflow": _LAKE,
    "examples.agentscope_frozenlake.workflow:FrozenLakeWorkflow": _LAKE,
    "examples.learn_to_ask.workflow.workflow_learn2ask:Learn2AskWorkflow": {"prompt": _CONVERSATION[:1]},
    f"{_BOTS_MODULE}:BOTSMathBoxedWorkflow": _BOTS,
    f"{_BOTS_MODULE}:BOTSRefEvalCollectMathBoxedWorkflow": _BOTS,
    "tool_call_workflow": _CALLS,
    "toolcall_workflow": _CALLS,
}
"""What a task of a workflow or a reward function must hold, beside a question and an answer, by their names."""
_REASONS = (
    (r"there is no (workflow|reward function) '([^']+)'", r"there is no \1 `\2`"),
    (r"there is no module '(examples\.[^']+)'", r"the project's own module `\1` is not in this repository"),
    (r"is (a recipe of Data-Juicer's)", r"no file of Trinity-RFT: \1"),
    (r"Data-Juicer's package is not installed", "needs Data-Juicer (`py-data-juicer`)"),
    (r"needs the package ([\w-]+)", r"needs `\1`"),
    (r"the workflow '([^']+)' of Trinity-RFT is not included", r"`\1` is not included"),
    (r"the reward function '([^']+)' of Trinity-RFT is not included", r"`\1` is not included"),
    (r"No module named '([^']+)'", r"needs `\1`"),
)
"""Why a file does not run: what a message says, and how the table has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of one file. `reason`: why it does not load, or does not run."""

    file: str
    loads: bool
    runs: bool
    reason: str = ""

    def __str__(self) -> str:
        return f"| `{self.file}` | {_word(self.loads)} | {_word(self.runs)} | {self.reason} |"


def _word(holds: bool) -> str:
    return "yes" if holds else "no"


_SCORES = ("accuracy", "grammar", "informativeness", "coherence")
_SCORES += ("linguistic_complexity", "conceptual_depth", "prior_knowledge", "step_complexity", "ambiguity")
_SAID = f"```json\n{json.dumps({'dimension_scores': dict.fromkeys(_SCORES, 4)})}\n``` \\boxed{{7}}"
"""What the endpoint answers: Data-Juicer's judges read scores in it, others a boxed answer."""


def measure(file: str, model: Path, place: Path, make: Callable[..., Path]) -> Row:
    """Load the file and run it in the folder `place`, on the toy model; `make` writes another one, for its judge."""
    if str(STAND_INS) not in sys.path:  # not at import: other tests of this process look for `wandb`
        sys.path.append(str(STAND_INS))
    path = FOLDER / file
    with _environment(path, place):
        try:
            resolved = resolve(load_config(path))
            check_names(resolved.config)
        except ConfigError as error:
            return Row(file=file, loads=False, runs=False, reason=_refused(error))
        if worlds.has(resolved.config.workflow):
            model = worlds.player(model, place / "player")
        if resolved.config.task_args.get("image_key"):
            model = seeing_model(model, place / "seeing")
        settings = _settings(resolved.config, model, place)
        if resolved.config.workflow in REPLIES:
            judge = write_judge(make, place / "judge", str(resolved.config.workflow))
            settings |= {f"auxiliary_models.{name}.model_path": str(judge) for name in resolved.config.auxiliary_models}
        if resolved.config.mode == "train":  # it trains what the explorer of the same run has sampled
            _run(path.with_name("explorer.yaml"), settings)
        code, printed = _run(path, settings)
    if code != 0:
        return Row(file=file, loads=True, runs=False, reason=_reason(printed))
    if not resolved.evaluate_only and resolved.config.mode != "explore":
        summary = next((place / "runs").glob("*/*/summary.json"))
        assert json.loads(summary.read_text())["steps"] == 2, file
        if worlds.has(resolved.config.workflow):  # RAFT's leave out the games that were lost
            assert _trained_tokens(summary.with_name("metrics.jsonl")) > 0, file
    return Row(file=file, loads=True, runs=True)


class _Printed(io.StringIO):
    """What is printed; the processes that a run starts (a search service) print elsewhere."""

    def fileno(self) -> int:
        """Where those print."""
        assert sys.__stderr__ is not None
        return sys.__stderr__.fileno()


def _trained_tokens(metrics: Path) -> float:
    """The tokens that all steps of a run trained."""
    return sum(json.loads(line).get("trainer/trained_tokens", 0) for line in metrics.read_text().splitlines())


def _run(path: Path, settings: Mapping[str, Any]) -> tuple[int, str]:
    """The exit code, and what was printed."""
    printed = _Printed()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main(["run", "--config", str(path), *(part for pair in settings.items() for part in _set(*pair))])
    return code, printed.getvalue()


@contextlib.contextmanager
def _environment(path: Path, place: Path) -> Iterator[None]:
    """The variables that the file cannot do without; what they name is in the folder `place`, or stands for it.
    The paths of a recipe are seen from there."""
    text = path.read_text()
    needed = {name: "not-set" for name in _VARIABLE.findall(text) if name not in os.environ}
    needed |= {"DEFAULT_EMAIL_DB_PATH": str(_mails(place / "mails.db")), "BOTS_REF_EVAL_LOG_FILE": str(place / "log")}
    needed |= {"TAVILY_API_KEY": "none", "SEARXNG_URL": "http://localhost"}
    needed["PATH"] = f"{STAND_INS / 'bin'}{os.pathsep}{os.environ['PATH']}"
    (place / "examples").symlink_to(FOLDER)
    with contextlib.ExitStack() as stack:
        if "config_path" in text:
            stack.enter_context(contextlib.chdir(place))
        if "external_model" in text or "data_processor" in text:
            needed |= {"OPENAI_BASE_URL": stack.enter_context(_endpoint()), "OPENAI_API_KEY": "none"}
        before = dict(os.environ)
        os.environ.update(needed)
        try:
            yield
        finally:
            for name in needed:
                del os.environ[name]
            os.environ.update(before)


def _mails(path: Path) -> Path:
    """A database of mails, empty, as the search for mails reads it."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            "CREATE TABLE emails (id INTEGER PRIMARY KEY, message_id, subject, from_address, date, body, file_name);"
            "CREATE TABLE recipients (email_id, recipient_address, recipient_type);"
            "CREATE VIRTUAL TABLE emails_fts USING fts5(subject, body, content='emails', content_rowid='id');"
        )
    return path


class _Answer(http.server.BaseHTTPRequestHandler):
    """An OpenAI-compatible endpoint that always says the same."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": _SAID}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        body = json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": choices})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@contextlib.contextmanager
def _endpoint() -> Iterator[str]:
    """The URL of an endpoint on this machine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def _set(name: str, value: Any) -> tuple[str, str]:
    return "--set", f"{name}={json.dumps(value)}"


def _settings(config: RunConfig, model: Path, place: Path) -> dict[str, Any]:
    """Paths and sizes, nothing else."""
    rows = place / "rows.jsonl"
    rows.write_text("".join(json.dumps(_row(config, number, place)) + "\n" for number in range(8)))
    found: dict[str, Any] = {**_SIZES, "checkpoint_root_dir": str(place / "runs"), "model.model_path": str(model)}
    if worlds.has(config.workflow):
        found |= {"model.max_tokens": 1, "rollout.max_concurrent_rollouts": 4}
    found["algorithm.group_size"] = min(config.algorithm.group_size, 4)
    datasets = ["train_dataset", *(["eval_dataset"] if config.eval_dataset else [])]
    datasets += [f"evaluation.further.{name}" for name in config.evaluation.further]
    if config.expert.dataset is not None:
        expert = place / "expert.jsonl"
        expert.write_text(f"{json.dumps(_expert_row(config))}\n" * 8)
        found |= {"expert.dataset.path": str(expert), "expert.dataset.name": None, "expert.dataset.split": "train"}
        found["expert.batch_size"] = 1
    for dataset in datasets:
        found |= {f"{dataset}.path": str(rows), f"{dataset}.name": None, f"{dataset}.split": "train"}
    found["train_dataset.total_steps"] = 2
    for name in config.auxiliary_models:
        found |= {f"auxiliary_models.{name}.model_path": str(model), f"auxiliary_models.{name}.max_model_len": 4096}
        found[f"auxiliary_models.{name}.max_tokens"] = 24
    if config.distill.teacher_path is not None:
        found["distill.teacher_path"] = str(model)
    return found


def _row(config: RunConfig, number: int, place: Path) -> dict[str, Any]:
    """A task, or a row to learn, with every field that the file's settings name."""
    keys = config.supervised
    has_world = worlds.has(config.workflow)
    question = worlds.question(config.workflow, number, place) if has_world else f"{number} + 1 = ?"
    row: dict[str, Any] = {keys.messages_key: _CONVERSATION, keys.text_key: question}
    if learns_from_rows(config.algorithm):
        texts = {keys.chosen_key: "7", keys.rejected_key: "8", keys.response_key: "7", keys.prompt_key: question}
        if config.algorithm.algorithm_type == "dpo" and keys.prompt_key != "prompt":
            texts[keys.prompt_key] = _CONVERSATION[:1]
            texts |= {keys.chosen_key: _CONVERSATION[1:], keys.rejected_key: _CONVERSATION[1:]}
        row |= texts
    for arguments in (config.task_args, *(own.task_args or {} for own in config.evaluation.own.values())):
        asked: Any = question
        answer: Any = "7"
        for name in (config.workflow, arguments.get("reward_fn")):
            given = dict(_ROWS.get(str(name), {}))
            asked, answer = given.pop("prompt", asked), given.pop("response", answer)
            row |= given
        row |= {arguments.get("prompt_key", "prompt"): asked, arguments.get("response_key", "response"): answer}
        if key := arguments.get("image_key"):
            row[key] = [image_url(number)]
    return row


def _expert_row(config: RunConfig) -> dict[str, Any]:
    """A row of an expert; of one that sees, with an image."""
    keys, image_key = config.supervised, config.task_args.get("image_key")
    if not image_key:
        return {keys.messages_key: _CONVERSATION}
    return {keys.prompt_key: "<image>6 + 1 = ?", keys.response_key: "7", image_key: [image_url(6)]}


def image_url(seed: int) -> str:
    """An image of random pixels as a data URL."""
    from picture_toys import draw

    return draw(seed).data_url


def seeing_model(model: Path, folder: Path) -> Path:
    """A tiny model that reads images, with the tokenizer of another one and room for long prompts."""
    from picture_toys import make_seeing_checkpoint

    made = make_seeing_checkpoint("qwen3_vl", folder, model)
    settings = json.loads((made / "config.json").read_text())
    settings["text_config"]["max_position_embeddings"] = 4096
    (made / "config.json").write_text(json.dumps(settings))
    return made


def _refused(error: ConfigError) -> str:
    """The keys that are refused, or the name that does not exist."""
    problems = getattr(error, "problems", ())
    keys = dict.fromkeys(f"`{'.'.join(problem.place)}`" for problem in problems)
    return ", ".join(keys) if keys else _reason(str(error))


def _reason(printed: str) -> str:
    """Why a run ended, from what it printed."""
    for pattern, reason in _REASONS:
        if found := re.search(pattern, printed):
            return found.expand(reason)
    last = next((line for line in reversed(printed.splitlines()) if line.startswith("sharpen: ")), "no message")
    last = re.sub(r" \(at /.*", "", last)  # where in the Python of this machine
    return last.removeprefix("sharpen: ").replace("|", "/")[:160]


def toy_model(make: Any, folder: Path) -> Path:
    """The tests' toy model, with room for long prompts, and likely to end its answer after each token (about 1 in 6):
    workflows leave out answers that were cut."""
    from transformers import AutoModelForCausalLM

    made: Path = make(folder)
    model = AutoModelForCausalLM.from_pretrained(made)
    rows = model.get_input_embeddings().weight.data  # tied: those of the last layer too
    rows += 0.02  # all have a part in common, of which the end token gets more
    rows[model.config.eos_token_id] += 0.16
    model.config.max_position_embeddings = 4096
    model.save_pretrained(made)
    return made


def table(rows: list[Row]) -> str:
    """The sentence that counts, and a table of the files that do not run unchanged."""
    loads, runs = sum(row.loads for row in rows), sum(row.runs for row in rows)
    head = f"Of {len(rows)} files, {loads} load and {runs} run unchanged: all but"
    others = [str(row) for row in rows if not row.runs]
    return "\n".join([head, "", "| file | loads | runs unchanged | why not |", "|---|---|---|---|", *others])


def written() -> str:
    """The table as the page has it."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()


def _write_or_print(names: list[str]) -> None:
    tests = Path(__file__).parents[1]
    sys.path[:0] = map(str, (tests, tests / "models", tests / "trainer"))
    from conftest import make_toy_model

    chosen = [file for file in FILES if not names or any(name in file for name in names)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = toy_model(make_toy_model, Path(folder) / "model")
        for number, file in enumerate(chosen):
            place = Path(folder, str(number))
            place.mkdir()
            rows.append(measure(file, model, place, make_toy_model))
            print(rows[-1], file=sys.__stdout__, flush=True)
    if not names:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    _write_or_print(sys.argv[1:])
