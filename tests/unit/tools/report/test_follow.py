"""The page that is served while runs train: to this machine alone, and always as of now."""

import json
from collections.abc import Generator
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread

import pytest

from evenstep.tools.report.follow import server


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text('{"update": 1, "train/loss": 2.5}\n')
    (tmp_path / "secret.txt").write_text("not for others")
    return tmp_path


@pytest.fixture
def port(run: Path) -> Generator[int]:
    with server([run]) as serving:
        thread = Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield int(serving.server_address[1])
        serving.shutdown()
        thread.join()


def get(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers={"Host": f"{host}:{port}"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_the_page_is_rebuilt_when_a_file_has_changed_and_its_state_says_so(run: Path, port: int) -> None:
    assert get(port, "/") == get(port, "/")
    assert "connect-src &#39;self&#39;" in get(port, "/")[1] or "connect-src 'self'" in get(port, "/")[1]
    before = get(port, "/state")
    assert get(port, "/state") == before
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"update": 2, "train/loss": 1.25}\n')
    assert get(port, "/state") != before
    text = get(port, "/")[1]
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert data["charts"][0]["curves"][0]["values"] == [2.5, 1.25]
    assert data["live"] is True
    assert not (run / "report.html").exists()


@pytest.mark.parametrize("path", ["/secret.txt", "/../secret.txt", "/metrics.jsonl", "/state/"])
def test_nothing_else_is_served(port: int, path: str) -> None:
    assert get(port, path)[0] == 404


def test_a_page_of_somebody_else_s_whose_name_leads_here_gets_nothing(port: int) -> None:
    assert get(port, "/", host="evil.example")[0] == 403
    assert get(port, "/", host="localhost")[0] == 200
