"""Answers that their owner marks in a browser, one after the other, by keys.

In: answers, without their rewards; the file of marks. Out: a server until Ctrl-C, behind the same gate as the pages
over runs; a line for each mark, on disk before the next answer is shown. Pages work without scripts too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from sharpen.agent.transcript import clean_for_page
from sharpen.evidence.judges.marks import Answer, Mark, add_mark
from sharpen.show.view.pages import HERE, page_templates, read_form
from sharpen.show.view.server import Gate, serve_app

QUESTION = "question"
"""The field of a task's row that is shown first; the others are folded beside it."""
SAID = {"good": True, "bad": False, "skip": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPage:
    """An answer as it is shown: its place among all, the task's question (empty: it has none), the task's other fields,
    the text."""

    number: int
    total: int
    question: str
    fields: tuple[tuple[str, str], ...]
    text: str


class Labelling:
    """The pages over some answers, whose marks go to the file `path`. `added` counts these."""

    def __init__(self, answers: Sequence[Answer], path: Path) -> None:
        self.added = 0
        self._answers, self._path = tuple(answers), path
        self._open = dict.fromkeys(range(len(answers)))
        """The numbers of answers that were neither marked nor skipped, in their order."""
        self._lock = threading.Lock()
        self._templates = page_templates()

    def app(self, token: str, port: int, _ending: Callable[[], bool]) -> ASGIApp:
        """Return the application."""
        routes = [
            Route("/", self._page),
            Route("/mark", self._mark, methods=["POST"]),
            Mount("/static", StaticFiles(directory=HERE / "static")),
        ]
        return Gate(Starlette(routes=routes), token, port)

    def _page(self, _: Request) -> Response:
        number = next(iter(self._open), None)
        page = None if number is None else _shown(self._answers[number], number, len(self._answers))
        template = self._templates.get_template("label.html")
        return HTMLResponse(template.render(page=page, added=self.added, path=str(self._path)))

    async def _mark(self, request: Request) -> Response:
        form = await read_form(request)
        number, said = form.get("number", ""), form.get("mark", "")
        if said not in SAID or not (number.isascii() and number.isdecimal() and int(number) < len(self._answers)):
            raise HTTPException(400, f"a mark has the number of an answer, and is {', '.join(SAID)}")
        try:
            await run_in_threadpool(self._keep, int(number), SAID[said])
        except OSError as error:
            raise HTTPException(409, f"the mark cannot be kept in {self._path}: {error.strerror}") from error
        return RedirectResponse("/", status_code=303)

    def _keep(self, number: int, good: bool | None) -> None:
        """Keep a mark, or none of an answer that is skipped. What was said of an answer before stays."""
        with self._lock:
            if number not in self._open:  # sent twice, or from another window
                return
            if good is not None:
                add_mark(self._path, Mark(answer=self._answers[number], good=good))
                self.added += 1
            del self._open[number]


def label(answers: Sequence[Answer], path: Path, *, port: int, opened: Callable[[str], None]) -> int:
    """Serve the answers until told to end; return how many were marked. `opened` receives the address. Raises
    `ConfigError` if the port is taken."""
    labelling = Labelling(answers, path)
    serve_app(labelling.app, port=port, opened=opened)
    return labelling.added


def _shown(answer: Answer, number: int, total: int) -> AnswerPage:
    fields = {
        name: clean_for_page(value if isinstance(value, str) else repr(value)) for name, value in answer.task.items()
    }
    question = fields.pop(QUESTION, "")
    return AnswerPage(
        number=number, total=total, question=question, fields=tuple(fields.items()), text=clean_for_page(answer.text)
    )
