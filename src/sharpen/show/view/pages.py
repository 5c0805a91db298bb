"""The pages: a route, the function that makes its data, its template.

In: a request. Out: HTML; with `?format=json` the same data as JSON.
"""

from __future__ import annotations

import datetime
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import jinja2
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from sharpen.agent.transcript import Decode
from sharpen.errors import ImageError
from sharpen.show.view import drawing
from sharpen.show.view.data.compare import compare_page
from sharpen.show.view.data.measures import to_json
from sharpen.show.view.data.rollout import call_tokens, rollout_page
from sharpen.show.view.data.run import curve_csv, reward_margins, reward_range, run_page, series
from sharpen.show.view.data.runs import runs_page
from sharpen.show.view.data.search import SearchQuery, name_of, number_of, search_page
from sharpen.show.view.data.tasks import step_page, task_page, tasks_page
from sharpen.show.view.files import RunFiles
from sharpen.show.view.folders import Folder
from sharpen.show.view.follow import Follower, events
from sharpen.show.view.library import Library, stamp
from sharpen.show.view.notes import MAX_CHARACTERS, Note, new_note, read_notes, write_note
from sharpen.types import Picture

HERE = Path(__file__).parent
FRESH_S = 0.3
"""How long a page waits for the index to have what is new; then it shows what the index has, and says so."""
MAX_FORM_BYTES = 256 << 10
T = TypeVar("T")


class Pages:
    """The pages over a library. `price_per_hour` is what the machine costs, None if it was not given. `ending` says
    whether the server is about to end, so that no stream keeps it."""

    def __init__(
        self, library: Library, price_per_hour: float | None = None, ending: Callable[[], bool] = lambda: False
    ) -> None:
        self._library = library
        self._price = price_per_hour
        self._ending = ending
        self._decoders = Decoders()
        self._templates = page_templates()

    @property
    def routes(self) -> list[Route | Mount]:
        """All routes. Functions that are not async run on threads of their own, so that none waits for another."""
        return [
            Route("/", self._runs, name="runs"),
            Route("/run/{run}", self._run, name="run"),
            Route("/events", self._events, name="events"),
            Route("/compare", self._compare, name="compare"),
            Route("/run/{run}/tasks", self._tasks, name="tasks"),
            Route("/run/{run}/task", self._task, name="task"),
            Route("/run/{run}/step/{step:int}", self._step, name="step"),
            Route("/run/{run}/rollouts", self._search, name="search"),
            Route("/run/{run}/find", self._find, name="find"),
            Route("/run/{run}/rollout/{rollout}", self._rollout, name="rollout"),
            Route("/run/{run}/rollout/{rollout}/tokens.json", self._tokens, name="tokens"),
            Route("/run/{run}/rollout/{rollout}/note", self._note, methods=["POST"], name="note"),
            Route("/run/{run}/image/{sha256}", self._image, name="image"),
            Route("/run/{run}/series.json", self._series, name="series"),
            Route("/run/{run}/curve.csv", self._curve, name="curve"),
            Mount("/static", StaticFiles(directory=HERE / "static"), name="static"),
        ]

    def _runs(self, request: Request) -> Response:
        query = request.query_params
        runs = [(folder, self._library.brief(folder)) for folder in self._library.folders()]
        page = runs_page(
            runs,
            sort=query.get("sort", "updated"),
            descending=query.get("order", "down") == "down",
            text=query.get("text", ""),
        )
        return self._answer(request, "runs.html", page, roots=[str(root) for root in self._library.roots])

    def _run(self, request: Request) -> Response:
        folder = self._folder(request)
        diagnosis = self._library.diagnoses.of(folder, stamp(folder.path), wait_s=FRESH_S)
        index = self._library.index(folder, wait_s=FRESH_S)
        files = self._library.files(folder)
        page = run_page(
            folder,
            files,
            diagnosis,
            margins=reward_margins(index),
            rewards=reward_range(index),
            price_per_hour=self._price,
        )
        return self._answer(request, "run.html", page, run=folder)

    def _series(self, request: Request) -> Response:
        files = self._library.files(self._folder(request))
        names = request.query_params.getlist("name")
        return JSONResponse(to_json([series(files, name) for name in names]))

    def _curve(self, request: Request) -> Response:
        folder = self._folder(request)
        return Response(curve_csv(folder, self._library.files(folder)), media_type="text/csv; charset=utf-8")

    async def _events(self, request: Request) -> Response:
        key = request.query_params.get("run")
        if key is not None:
            _found(await run_in_threadpool(self._library.folder, key), f"the key {key!r}")
        follower = Follower(self._library, key)
        return StreamingResponse(events(follower, self._ending), media_type="text/event-stream")

    def _compare(self, request: Request) -> Response:
        keys = dict.fromkeys(request.query_params.getlist("run"))
        folders = [folder for folder in self._library.folders() if folder.key in keys]
        if len(folders) < 2:
            raise HTTPException(404, "name two runs to compare: /compare?run=KEY&run=KEY")
        folders.sort(key=lambda folder: list(keys).index(folder.key))
        runs = [
            (folder, self._library.files(folder), self._library.index(folder, wait_s=FRESH_S)) for folder in folders
        ]
        return self._answer(request, "compare.html", compare_page(runs, price_per_hour=self._price))

    def _tasks(self, request: Request) -> Response:
        folder, query = self._folder(request), request.query_params
        page = tasks_page(
            self._library.index(folder, wait_s=FRESH_S),
            place=query.get("of", ""),
            order=query.get("order", "change"),
            text=query.get("text", ""),
            page=_whole(query.get("page")),
        )
        return self._answer(request, "tasks.html", page, run=folder)

    def _task(self, request: Request) -> Response:
        folder = self._folder(request)
        task = request.query_params.get("id", "")
        page = _found(task_page(self._library.index(folder, wait_s=FRESH_S), task), f"a task {task!r}")
        return self._answer(request, "task.html", page, run=folder)

    def _step(self, request: Request) -> Response:
        folder, step = self._folder(request), request.path_params["step"]
        page = _found(step_page(self._library.index(folder, wait_s=FRESH_S), step), f"a group of step {step}")
        return self._answer(request, "step.html", page, run=folder)

    def _search(self, request: Request) -> Response:
        folder = self._folder(request)
        index = self._library.index(folder, wait_s=FRESH_S)
        noted = {name_of_note(note): note.thumb for note in read_notes(folder.path).values()}
        page = search_page(index, SearchQuery.of(request.query_params), noted)
        return self._answer(request, "search.html", page, run=folder)

    def _find(self, request: Request) -> Response:
        """Go to the rollout with an id; of a step that was repeated, to its last."""
        folder, wanted = self._folder(request), request.query_params.get("id", "")
        with self._library.index(folder, wait_s=FRESH_S).reading() as connection:
            found = connection.execute(
                "SELECT number FROM rollouts WHERE id = ? ORDER BY kind = 0, number DESC", (wanted,)
            ).fetchone()
        number = _found(found, f"a rollout {wanted!r}")[0]
        return RedirectResponse(_url("run", folder.key, "rollout", name_of(number)), status_code=303)

    def _rollout(self, request: Request) -> Response:
        folder, number = self._folder(request), self._number(request)
        note = read_notes(folder.path).get(place_of(number))
        page = _found(rollout_page(self._library.index(folder), number, note), "a rollout of this name")
        return self._answer(request, "rollout.html", page, run=folder)

    def _tokens(self, request: Request) -> Response:
        folder, number = self._folder(request), self._number(request)
        decode, problem = self._decoders.of(self._library.files(folder))
        call = _whole(request.query_params.get("call"), least=0)
        tokens = call_tokens(self._library.index(folder), number, call, decode, problem)
        return JSONResponse(to_json(_found(tokens, f"a call {call}")))

    def _image(self, request: Request) -> Response:
        """A recorded image: nothing else that lies there, and as nothing else."""
        name = request.path_params["sha256"]
        path = self._folder(request).path / "images" / name
        if re.fullmatch("[0-9a-f]{64}", name) is None or not path.is_file():
            raise HTTPException(404, "not found: an image of this name")
        picture = Picture(sha256=name, path=path)
        try:
            content, kind = picture.data, picture.media_type
        except ImageError as error:
            raise HTTPException(404, str(error)) from error
        if not kind.startswith("image/"):
            raise HTTPException(404, "not found: this file is no image")
        return Response(content, media_type=kind)

    async def _note(self, request: Request) -> Response:
        folder, number = self._folder(request), self._number(request)
        form = await read_form(request)
        thumb, text = form.get("thumb", ""), form.get("text", "")
        page = await run_in_threadpool(rollout_page, self._library.index(folder), number, None)
        source, key = place_of(number)
        try:
            note = new_note(_found(page, "a rollout of this name").id, source, key, thumb, text)
            await run_in_threadpool(write_note, folder.path, note)
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        except OSError as error:
            raise HTTPException(409, f"the note cannot be kept in {folder.path}: {error.strerror}") from error
        if "application/json" in request.headers.get("accept", ""):
            return JSONResponse(to_json(note))
        return RedirectResponse(_url("run", folder.key, "rollout", name_of(number)), status_code=303)

    def _number(self, request: Request) -> int:
        return _found(number_of(request.path_params["rollout"]), "a rollout of this name")

    def _folder(self, request: Request) -> Folder:
        folder = self._library.folder(request.path_params["run"])
        if folder is None:
            raise HTTPException(404, f"there is no run {request.path_params['run']!r} here")
        return folder

    async def refused(self, request: Request, error: Exception) -> Response:
        """Answer a request for what is not there, or may not be done."""
        assert isinstance(error, HTTPException)
        title = "This is not here" if error.status_code == 404 else "This cannot be done"
        return self._problem(request, error.status_code, title, error.detail)

    async def unreadable(self, request: Request, error: Exception) -> Response:
        """Answer where a journal is damaged, or held by somebody else."""
        return self._problem(request, 503, "This cannot be read", str(error))

    async def made_anew(self, request: Request, error: Exception) -> Response:
        """Let a request that met a damaged index come again."""
        if request.method != "GET":
            return await self.unreadable(request, error)
        query = f"?{request.url.query}" if request.url.query else ""
        path = "/" + request.url.path.lstrip("/")  # two slashes would name another host
        return RedirectResponse(f"{urllib.parse.quote(path)}{query}", status_code=303)

    def _problem(self, request: Request, status: int, title: str, text: str) -> Response:
        """A page for a person, a line of text for a program."""
        if "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse(f"{text}\n", status_code=status)
        page = self._templates.get_template("problem.html").render(title=title, text=text)
        return HTMLResponse(page, status_code=status)

    def _answer(self, request: Request, template: str, page: Any, **more: Any) -> Response:
        if request.query_params.get("format") == "json":
            return JSONResponse(to_json(page))
        return HTMLResponse(
            self._templates.get_template(template).render(page=page, query=request.query_params, **more)
        )


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form. One that is too long is refused before it is read."""
    parts: list[bytes] = []
    async for part in request.stream():
        parts.append(part)
        if sum(map(len, parts)) > MAX_FORM_BYTES:
            raise HTTPException(413, f"a note has {MAX_CHARACTERS:,} characters at most")
    return dict(urllib.parse.parse_qsl(b"".join(parts).decode("utf-8", "replace"), keep_blank_values=True))


def _found(value: T | None, what: str) -> T:
    """Return a value that there is; else the answer is 404."""
    if value is None:
        raise HTTPException(404, f"not found: {what}")
    return value


def _whole(text: str | None, least: int = 1) -> int:
    """Return a number of an address; the least one if it is none."""
    return max(least, int(text)) if text and text.isascii() and text.isdigit() and len(text) < 10 else least


def place_of(number: int) -> tuple[str, int]:
    """Return the journal that a rollout is in, and its key there."""
    return ("evaluations.db" if number % 2 else "run.db"), number // 2


def name_of_note(note: Note) -> str:
    """Return the name in addresses of the rollout that a note is about."""
    return name_of(2 * note.key + (note.source == "evaluations.db"))


@cache
def page_templates() -> jinja2.Environment:
    """The templates: whatever they show is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["json"] = to_json
    environment.filters["time"] = _time
    environment.globals["url"] = _url
    drawing.register(environment)
    return environment


def _url(*parts: str, **query: Any) -> str:
    """Return the address of a page: `url('run', key, 'tasks', page=2)`; a query that is None is left out."""
    path = "/" + "/".join(urllib.parse.quote(str(part), safe="") for part in parts)
    given: Mapping[str, Any] = {name: value for name, value in query.items() if value is not None}
    return path + (f"?{urllib.parse.urlencode(given, doseq=True)}" if given else "")


def _time(seconds: float | None) -> str:
    """Return a time as text, of this machine's zone."""
    return "" if seconds is None else f"{datetime.datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"


# The text of token ids: the tokenizer of a run.
#
# In: a run's folder and settings. Out: a function from ids to text, and why there is none where there is none. Only
# the tokenizer's file is read, never a model.

FILE = "tokenizer.json"


class Decoders:
    """The decoders of runs, each made once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[Path, Decode] = {}

    def of(self, files: RunFiles) -> tuple[Decode | None, str]:
        """Return a run's decoder, or None and the reason."""
        file = next((folder / FILE for folder in _folders(files) if (folder / FILE).is_file()), None)
        if file is None:
            model = files.setting("model.model_path")
            return None, f"tokens are shown as ids: there is no {FILE} in the run's checkpoints, nor in {model}"
        with self._lock:
            if file not in self._found:
                try:
                    self._found[file] = _decoder(file)
                except Exception as error:  # what the library raises for a damaged file is its own business
                    return None, f"tokens are shown as ids: {file} cannot be read ({error})"
            return self._found[file], ""


def _folders(files: RunFiles) -> Iterator[Path]:
    """The places where the tokenizer may be: checkpoints, the model before training, or its copy from the hub."""
    yield from (files.path / name for name in ("latest", "best"))
    yield from sorted(files.path.glob("global_step_*"), reverse=True)
    model = files.setting("model.model_path")
    if isinstance(model, str):
        yield Path(model).expanduser()
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = try_to_load_from_cache(model, FILE)
        except HFValidationError:  # a path
            return
        if isinstance(cached, str):
            yield Path(cached).parent


def _decoder(file: Path) -> Decode:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return decode
