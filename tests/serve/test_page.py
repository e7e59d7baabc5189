"""The page in a real browser, against a server with canned answers: what people see of chunks, candidates and refusals."""

import contextlib
import html.parser
import http.server
import json
import pathlib
import shutil
import subprocess
import threading
from collections.abc import Iterator

import pytest

from calm_jax.serve import app

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BROWSER, reason="needs Chromium on the PATH"),
]
PAGE = pathlib.Path(app.__file__).with_name("page.html").read_text(encoding="utf-8")
OPTIONS = {"temperature": 0.5, "max_tokens": 8, "max_draws": 216, "top_p": 1.0, "sampler": "pooled"}
HOSTILE = "<img src=x onerror=alert(1)>"
# Generates once, and looks at the first chunk of each text; the page is photographed or read after that.
USE = """<script>
(async () => {
  while (!models.length) await new Promise(go => setTimeout(go, 10));
  $("prompt").value = PROMPT;
  await $("form").onsubmit(new Event("submit"));
  for (const model of models) model.text.querySelector(".chunk")?.click();
})();
</script></body>"""


def model(name: str, is_calm: bool) -> dict:
    calm = {"is_calm": is_calm, "chunk_size": 4 if is_calm else 1, "samplers": ["pooled", "batch"]}
    limits = {"max_tokens": 64, "draws": 4096}
    return {"id": name, "calm": calm | {"options": OPTIONS, "limits": limits}}


def event(text: str, **calm) -> str:
    about = {"tokens": [1, 2], "draws": 80, "decoded": 9, "exact": True, "seconds": 0.5} | calm
    choice = {"index": 0, "text": text, "finish_reason": None, "calm": about}
    return "data: " + json.dumps({"choices": [choice], "calm": {"seed": 7}}) + "\n\n"


CANDIDATES = [
    {"text": HOSTILE, "tokens": [1, 2], "votes": 40},
    {"text": "\n b", "tokens": [3, 4], "votes": 24},
]
STREAM = (
    event(HOSTILE, candidates=CANDIDATES, pool=64) + event(" c", exact=False) + "data: [DONE]\n\n"
)
RARE = event(" e", tokens=[9, 9], candidates=CANDIDATES, pool=64) + "data: [DONE]\n\n"


@contextlib.contextmanager
def serving(models: list[dict], answers: dict[str, tuple[int, str, str]]) -> Iterator[str]:
    """The address of a server with the page and these models; `answers`: status, type and body by the model asked for."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def reply(self, status: int, kind: str, body: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body.encode())

        def do_GET(self) -> None:
            if self.path == "/":
                script = USE.replace("PROMPT", json.dumps("def " + HOSTILE))
                self.reply(200, "text/html", PAGE.replace("</body>", script))
            else:
                self.reply(200, "application/json", json.dumps({"data": models}))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.reply(*answers[json.loads(body)["model"]])

        def log_message(self, *args) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def browse(address: str, folder: pathlib.Path, *options: str) -> str:
    """What Chromium prints about a page, once its scripts have nothing left to do."""
    flags = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}")
    command = (BROWSER, *flags, "--virtual-time-budget=10000", *options, address)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Texts(html.parser.HTMLParser):
    """The texts of the elements of a class, in `found`."""

    def __init__(self, page: str, kind: str):
        super().__init__()
        self.found, self._kind, self._depth = [], kind, 0
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if self._depth:
            self._depth += 1
        elif self._kind in (dict(attrs).get("class") or "").split():
            self.found.append("")
            self._depth = 1

    def handle_endtag(self, tag):
        self._depth = max(0, self._depth - 1)

    def handle_data(self, data):
        if self._depth:
            self.found[-1] += data


def test_both_models_answer_and_a_chunk_shows_its_candidates(tmp_path):
    models = [model("calm", True), model("baseline", False)]
    answers = {"calm": (200, "text/event-stream", STREAM)}
    answers["baseline"] = (200, "text/event-stream", event(" d", draws=1) + "data: [DONE]\n\n")
    with serving(models, answers) as address:
        page = browse(address, tmp_path, "--dump-dom")
    assert Texts(page, "chunk").found == [HOSTILE, " c", " d"]
    assert Texts(page, "approximate").found == [" c"]
    assert "<img" not in page.partition("<script>")[0]
    calm, baseline = Texts(page, "about").found
    assert "80 draws" in calm and "exact, 500.0 ms" in calm
    assert f"The pool of 64 draws that it was chosen from, by votes:40{HOSTILE}24↵ b" in calm
    assert "pool" not in baseline
    assert "one of the other draws" not in calm
    assert "2 chunks" in Texts(page, "hint").found[0]


def test_a_chunk_that_is_none_of_the_candidates_is_said_to_be_another_draw(tmp_path):
    with serving([model("calm", True)], {"calm": (200, "text/event-stream", RARE)}) as address:
        page = browse(address, tmp_path, "--dump-dom")
    (about,) = Texts(page, "about").found
    assert about.endswith("The chosen chunk is one of the other draws.")


@pytest.mark.parametrize(
    "status, kind, body, message",
    [
        (503, "text/plain", "Too many connections", "Too many connections"),
        (502, "text/plain", "", "Bad Gateway"),
        (400, "application/json", '{"error": {"message": "prompt 0 is long"}}', "prompt 0 is long"),
        (
            200,
            "text/event-stream",
            event("a") + 'data: {"error": {"message": "the model failed"}}\n\n',
            "the model failed",
        ),
    ],
)
def test_a_refusal_is_shown_beside_the_model_that_refused(tmp_path, status, kind, body, message):
    """Also those of which uvicorn and Starlette make plain text; the other model's text is there."""
    answers = {"calm": (status, kind, body), "other": (200, "text/event-stream", STREAM)}
    with serving([model("calm", True), model("other", True)], answers) as address:
        page = browse(address, tmp_path, "--dump-dom")
    # The first is the page's own.
    assert Texts(page, "error").found == ["", message, ""]
    assert Texts(page, "chunk").found[-2:] == [HOSTILE, " c"]
