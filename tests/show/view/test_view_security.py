"""The pages answer a browser of this machine with the token, and nobody else."""

import pytest
from addresses import PAGES

from sharpen.show.view.folders import Folder
from sharpen.show.view.server import HEADERS


@pytest.mark.parametrize("page", PAGES)
def test_nothing_without_the_token(client, run, page):
    response = client(run, token="").get(page.format(run=Folder.of(run).key))
    assert response.status_code == 401
    assert run.name not in response.text.replace("run", "")


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("host", ["evil.example", "evil.example:8123", "127.0.0.1.evil.example", "localhost.evil", ""])
def test_nothing_under_another_name(client, run, page, host):
    """A site whose name was made to resolve to the loopback (DNS rebinding) is refused, even with the token."""
    response = client(run).get(page.format(run=Folder.of(run).key), headers={"host": host})
    assert response.status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
@pytest.mark.parametrize("page", PAGES)
def test_nothing_for_another_site(client, run, page, headers):
    """Neither a page of the network nor one of another port of this machine."""
    assert client(run).get(page.format(run=Folder.of(run).key), headers=headers).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1:8123", "localhost:8123", "[::1]:8123", "localhost:9000", "LOCALHOST"])
def test_names_of_this_machine_pass(client, run, host):
    """Also with the port of a tunnel (ssh -L 9000:127.0.0.1:8123)."""
    own = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
    assert client(run).get("/", headers=own).status_code == 200


def test_the_opened_address_sets_a_cookie_that_scripts_and_other_sites_do_not_have(client, run):
    open_client = client(run, token="")
    key = Folder.of(run).key
    # A terminal in a page of another site opens it too.
    opened = open_client.get(
        f"/run/{key}?token=the-token&sort=name", headers={"sec-fetch-site": "cross-site", "sec-fetch-dest": "document"}
    )
    assert opened.status_code == 200
    assert f'url=/run/{key}?sort=name"' in opened.text
    assert "the-token" not in opened.text
    cookie = opened.headers["set-cookie"].lower()
    assert "sharpen-view-8123=the-token" in cookie
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert open_client.get(f"/run/{key}").status_code == 200


def test_a_wrong_token_opens_nothing(client, run):
    response = client(run, token="").get("/?token=the-tokem")
    assert response.status_code == 401
    assert "set-cookie" not in response.headers
    assert client(run, token="the-tokem").get("/").status_code == 401


def test_a_script_of_another_site_gets_no_cookie_set(client, run):
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-dest": "empty"}
    assert client(run, token="").get("/?token=the-token", headers=headers).status_code == 403


def test_the_opened_address_leads_nowhere_else(client, run):
    """`//evil.example` is another host for a browser."""
    response = client(run, token="").get("http://127.0.0.1:8123//evil.example/?token=the-token")
    assert 'url=/evil.example/"' in response.text


@pytest.mark.parametrize("page", [*PAGES, "/nowhere"])
def test_every_answer_forbids_scripts_that_are_not_ours(client, run, page):
    for found in (client(run), client(run, token="")):
        response = found.get(page.format(run=Folder.of(run).key))
        assert {name: response.headers[name] for name in HEADERS} == dict(HEADERS)
    policy = dict(part.split(" ", 1) for part in HEADERS["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == "'self'"


def test_static_files_end_at_their_folder(client, run):
    found = client(run)
    assert found.get("/static/view.css").status_code == 200
    for path in ("/static/../pages.py", "/static/..%2fpages.py", "/static/%2e%2e/pages.py", "/static//etc/passwd"):
        assert found.get(path).status_code == 404
