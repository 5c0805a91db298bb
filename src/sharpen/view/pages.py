"""The pages: a route, the function that makes its data, its template.

In: a request. Out: HTML; with `?format=json` the same data as JSON.
"""

from __future__ import annotations

import datetime
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from sharpen.view import drawing
from sharpen.view.data.measures import to_json
from sharpen.view.data.run import run_page, series
from sharpen.view.data.runs import runs_page
from sharpen.view.folders import Folder
from sharpen.view.library import Library

HERE = Path(__file__).parent


class Pages:
    """The pages over a library. `price_per_hour` is what the machine costs, None if it was not given."""

    def __init__(self, library: Library, price_per_hour: float | None = None) -> None:
        self._library = library
        self._price = price_per_hour
        self._templates = _environment()

    @property
    def routes(self) -> list[Route | Mount]:
        """All routes. Functions that are not async run on threads of their own, so that none waits for another."""
        return [
            Route("/", self._runs, name="runs"),
            Route("/run/{run}", self._run, name="run"),
            Route("/run/{run}/series.json", self._series, name="series"),
            Mount("/static", StaticFiles(directory=HERE / "static"), name="static"),
        ]

    def _runs(self, request: Request) -> Response:
        query = request.query_params
        runs = [(folder, self._library.files(folder)) for folder in self._library.folders()]
        page = runs_page(
            runs,
            sort=query.get("sort", "updated"),
            descending=query.get("order", "down") == "down",
            text=query.get("text", ""),
        )
        return self._answer(request, "runs.html", page, roots=[str(root) for root in self._library.roots])

    def _run(self, request: Request) -> Response:
        folder = self._folder(request)
        page = run_page(folder, self._library.files(folder), price_per_hour=self._price)
        return self._answer(request, "run.html", page, run=folder)

    def _series(self, request: Request) -> Response:
        files = self._library.files(self._folder(request))
        names = request.query_params.getlist("name")
        return JSONResponse(to_json([series(files, name) for name in names]))

    def _folder(self, request: Request) -> Folder:
        folder = self._library.folder(request.path_params["run"])
        if folder is None:
            raise HTTPException(404, f"there is no run {request.path_params['run']!r} here")
        return folder

    def _answer(self, request: Request, template: str, page: Any, **more: Any) -> Response:
        if request.query_params.get("format") == "json":
            return JSONResponse(to_json(page))
        return HTMLResponse(
            self._templates.get_template(template).render(page=page, query=request.query_params, **more)
        )


def _environment() -> jinja2.Environment:
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
