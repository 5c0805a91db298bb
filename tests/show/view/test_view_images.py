"""Recorded images: on a rollout's page, and in the rows that are exported."""

import base64
import io

from experience_builders import make_call, make_group, make_rollout
from PIL import Image

from sharpen.agent.transcript import content_text
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.reading import read_groups
from sharpen.serve.record.rows import LeftOut, rollout_rows, sft_rows
from sharpen.show.view.folders import Folder
from sharpen.types import Picture, PictureSpan


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (3, 2), (200, 0, 0)).save(file, "PNG")
    return file.getvalue()


def test_a_recorded_image_is_shown_from_the_run_s_folder(tmp_path, client, library):
    """Served by its hash as what it is, and nothing else that lies there or elsewhere."""
    picture, drawing = Picture.of(png()), Picture.of(b"<svg onload='x'/>")
    shown = tuple(PictureSpan(picture=one, start=1 + 2 * n, length=1) for n, one in enumerate((picture, drawing)))
    parts = [{"type": "image_url", "image_url": {"url": f"sha256:{one.sha256}"}} for one in (picture, drawing)]
    message = {"role": "user", "content": [{"type": "text", "text": "how many?"}, *parts]}
    call = make_call(0, [1, 9, 2, 9], [3], messages=(message,), pictures=shown)
    folder = tmp_path / "run"
    folder.mkdir()
    with Journal(folder / "run.db") as journal:
        journal.add(make_group([make_rollout([call], group="step-0/t")], group="step-0/t"))
    (folder / "images" / ("a" * 64)).write_bytes(b"changed")
    library(folder).index(Folder.of(folder), wait_s=120)
    http, key = client(folder), Folder.of(folder).key
    page = http.get(f"/run/{key}/rollout/t1")
    assert (page.status_code, f'src="../image/{picture.sha256}"' in page.text) == (200, True)
    image = http.get(f"/run/{key}/image/{picture.sha256}")
    assert (image.status_code, image.headers["content-type"], image.content) == (200, "image/png", picture.data)
    assert image.headers["x-content-type-options"] == "nosniff"
    for name in (drawing.sha256, "a" * 64, "b" * 64, "run.db", "..%2Frun.db", picture.sha256.upper()):
        assert http.get(f"/run/{key}/image/{name}").status_code == 404
    assert client(folder, token="wrong").get(f"/run/{key}/image/{picture.sha256}").status_code == 401
    assert (
        content_text(message["content"]) == f"how many?\n[image {picture.sha256[:12]}]\n[image {drawing.sha256[:12]}]"
    )
    (row,) = rollout_rows(read_groups(folder / "run.db"), {}, LeftOut())
    assert row["images"][0] == "data:image/png;base64," + base64.b64encode(picture.data).decode()
    (lesson,) = sft_rows(read_groups(folder / "run.db"), None, LeftOut())
    assert lesson["messages"][0]["content"][1]["image_url"]["url"] == row["images"][0]
