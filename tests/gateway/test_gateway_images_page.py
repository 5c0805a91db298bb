"""The programs of docs/use/images.md for a client: each vendor's shows the image that the page says."""

import asyncio
import base64
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from picture_toys import draw, make_seeing_checkpoint
from transformers import AutoConfig, AutoTokenizer

from sharpen.gateway.images import Album
from sharpen.models.images import eyes_of

PAGE = (Path(__file__).parents[2] / "docs" / "use" / "images.md").read_text(encoding="utf-8")
PROGRAMS = [code for code in re.findall("```python\n(.*?)```", PAGE, re.DOTALL) if "client." in code]


def test_the_page_has_a_program_for_each_protocol() -> None:
    assert [re.search(r"client\.(\w+)", code)[1] for code in PROGRAMS] == ["chat", "responses", "messages"]


@pytest.mark.parametrize("code", PROGRAMS, ids=["chat", "responses", "messages"])
def test_a_program_of_the_page(serve: Any, code: str, tmp_path: Path, toy_model_dir: Path) -> None:
    folder = make_seeing_checkpoint("qwen3_vl", tmp_path / "seeing", toy_model_dir)
    eyes = eyes_of(folder, AutoConfig.from_pretrained(folder))
    session = serve("two", tokenizer=AutoTokenizer.from_pretrained(folder), album=Album(eyes)).open()
    picture = draw(1)
    names: dict[str, Any] = {"model": session.model, "encoded": base64.b64encode(picture.data).decode()}
    exec(f"async def piece():\n{textwrap.indent(code, '    ')}\n    return reply", names)
    assert "two" in str(asyncio.run(names["piece"]()))
    (call,) = session.close()
    assert [span.picture for span in call.pictures] == [picture]
