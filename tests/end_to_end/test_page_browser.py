"""The page in a real browser: Debian's chromium, driven by Playwright, and a scripted engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from tests.gateway.chat_formats.transcripts import block, smallest_pieces, v31_call
from tests.gateway.conftest import write_tokenizer
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.serving import serving, wait_until
from whalepod.scheduler.stats import Stats
from whalepod.server.config import GatewayConfig
from whalepod.server.gateway.app import create_app
from whalepod.server.tokenizer import TextTokenizer

pytestmark = pytest.mark.ranks
ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
AXE = (Path(__file__).parent / "axe" / "axe.min.js").read_text()
DEADLINE_MS = 30_000
NARROW = {"width": 360, "height": 720}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
VIEWS = ("chat", "settings", "list", "board")
TOO_WIDE = """() => [...document.querySelectorAll("#app > *, main > *, .wide > *, .panel > *")]
    .filter(element => element.getBoundingClientRect().right > innerWidth + 0.5)
    .map(element => element.className)"""
expect.set_options(timeout=DEADLINE_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium")
    if program is None:  # with --ci a skip is a failure
        pytest.skip("these tests need a browser: apt-get install chromium")
    # ended with the module: Playwright keeps an event loop running in this thread
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer.from_folder(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def engine(tokenizer: TextTokenizer) -> FakeEngine:
    return FakeEngine(tokenizer)


@contextmanager
def page_of(browser: Browser, engine: FakeEngine, *keys: str, **context: Any) -> Iterator[Page]:
    """Open the page; fails afterwards if it logged an error or asked any other host."""
    config = GatewayConfig(served_model_name=("tiny",), api_key=keys)
    problems: list[str] = []
    with ExitStack() as stack:
        port = stack.enter_context(serving(create_app(config, engine, engine.tokenizer)))
        address = f"http://127.0.0.1:{port}"
        tab = stack.enter_context(browser.new_context(base_url=address, **context))
        tab.set_default_timeout(DEADLINE_MS)
        tab.on("request", lambda r: r.url.startswith((address, "blob:")) or problems.append(r.url))
        tab.on("weberror", lambda error: problems.append(str(error.error)))
        page = tab.new_page()
        page.on("console", lambda m: m.type == "error" and problems.append(m.text))
        page.goto("/")
        yield page
    assert [p for p in problems if "401" not in p] == []


@pytest.fixture
def page(browser: Browser, engine: FakeEngine) -> Iterator[Page]:
    with page_of(browser, engine) as page:
        yield page


def script(engine: FakeEngine, *steps: str) -> None:
    """Have the next answers say `steps`, one piece at a time."""
    engine.says = steps


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def messages(page: Page) -> Any:
    return page.locator("ol.messages > li")


def finished(page: Page) -> None:
    """Wait until an answer is complete."""
    expect(page.get_by_role("button", name="Regenerate")).to_be_enabled()


def status(page: Page) -> Any:
    return page.locator("main [role=status][aria-live=polite]")


def test_an_answer_streams_and_is_measured(page: Page, engine: FakeEngine) -> None:
    script(engine, "Whales ", "are **big**", ".")
    send(page, "Tell me")

    answer = messages(page).nth(1)
    expect(answer.locator(".prose strong")).to_have_text("big")
    finished(page)
    expect(answer.locator(".measures")).to_contain_text("first token")
    expect(answer.locator(".measures")).to_contain_text("tok/s")
    tokens = len(engine.tokenizer.encode("Whales ", adds_bos=False))
    assert tokens > 1  # so that the count is the engine's, not the number of pieces
    expect(answer.locator(".measures")).to_contain_text(" tokens")


def test_the_end_of_an_answer_is_announced_and_not_its_tokens(
    page: Page, engine: FakeEngine
) -> None:
    script(engine, *(f"piece{i} " for i in range(20)))
    page.evaluate(
        """() => {
            window.said = [];
            const status = document.querySelector("main [role=status]");
            new MutationObserver(() => window.said.push(status.textContent))
                .observe(status, {characterData: true, childList: true, subtree: true});
        }"""
    )
    send(page, "Go")
    finished(page)

    expect(status(page)).to_contain_text("Answer complete. piece0 ")
    assert len(page.evaluate("window.said")) == 1


def test_escape_stops_the_answer_in_the_engine_too(page: Page, engine: FakeEngine) -> None:
    engine.step_delay_s = 0.05
    script(engine, *["more "] * 2000)
    send(page, "Never end")
    expect(messages(page).nth(1).locator(".prose")).to_contain_text("more more")
    page.keyboard.press("Escape")

    expect(messages(page).nth(1).locator(".measures")).to_contain_text("stopped")
    wait_until(lambda: engine.aborted and not engine.running)
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    expect(messages(page).nth(1).locator(".prose")).to_contain_text("more more")


def test_an_edited_message_is_a_new_branch(page: Page, engine: FakeEngine) -> None:
    send(page, "first question")
    finished(page)
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit your message").fill("second question")
    page.get_by_role("button", name="Send as new branch").click()

    expect(messages(page).first.locator(".bubble")).to_have_text("second question")
    finished(page)
    expect(messages(page)).to_have_count(2)
    page.get_by_role("button", name="Earlier branch").click()
    expect(messages(page).first.locator(".bubble")).to_have_text("first question")
    assert len(engine.submitted) == 2


def test_regenerating_keeps_the_other_answer(page: Page, engine: FakeEngine) -> None:
    script(engine, "one")
    send(page, "count")
    finished(page)
    script(engine, "two")
    page.get_by_role("button", name="Regenerate").click()

    answer = messages(page).nth(1)
    expect(answer.locator(".prose")).to_have_text("two")
    finished(page)
    expect(answer.locator(".branches")).to_contain_text("2 / 2")
    answer.get_by_role("button", name="Earlier branch").click()
    expect(answer.locator(".prose")).to_have_text("one")


def test_settings_reach_the_engine(page: Page, engine: FakeEngine) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    values = {"Temperature": "0.3", "Top p": "0.9", "Top k": "7", "Most tokens": "5", "Seed": "11"}
    for label, value in values.items():
        page.get_by_label(label).fill(value)
    page.keyboard.press("Escape")
    send(page, "hello")
    finished(page)

    (submit,) = engine.submitted
    params = submit.params
    assert (params.temperature, params.top_p, params.top_k) == (0.3, 0.9, 7)
    assert (params.max_tokens, params.seed) == (5, 11)
    prompt = engine.tokenizer.decode(submit.prompt_token_ids)
    assert prompt.index("Be brief.") < prompt.index("hello")
    expect(messages(page).nth(1).locator(".measures")).to_contain_text("5 tokens")
    expect(messages(page).nth(1).locator(".measures")).to_contain_text("cut at the token limit")


def test_a_broken_setting_is_an_error_that_names_it(page: Page, engine: FakeEngine) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Tools").fill("[{]")
    page.get_by_role("button", name="Close").click()
    send(page, "hi")

    expect(page.get_by_role("alert")).to_contain_text("“tools” is not JSON")
    assert engine.submitted == []


def test_a_failure_in_the_middle_keeps_the_text_and_says_why(
    page: Page, engine: FakeEngine
) -> None:
    script(engine, "so far", "!raise")
    send(page, "hi")

    expect(messages(page).nth(1).locator(".prose")).to_have_text("so far")
    expect(page.get_by_role("alert")).to_contain_text("the step failed")
    finished(page)


def test_thoughts_and_tool_calls_are_folded_and_results_go_back(
    page: Page, engine: FakeEngine
) -> None:
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda r: r.method == "POST" and bodies.append(r.post_data_json))
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Thinking").select_option("on")
    page.get_by_label("Tools").fill(json.dumps([WEATHER]))
    call = block(v31_call("weather", '{"city": "Hangzhou"}'))
    script(engine, "I need ", "a tool.", "</think>", *smallest_pieces(call))
    send(page, "Weather?")

    thoughts = page.locator("details", has_text="Thoughts")
    expect(thoughts.get_by_text("I need a tool.")).to_be_hidden()
    thoughts.locator("summary").click()
    expect(thoughts.get_by_text("I need a tool.")).to_be_visible()
    shown = page.locator("details", has_text="Calls weather")
    expect(shown.locator("pre")).to_contain_text('"city": "Hangzhou"')
    finished(page)
    expect(status(page)).to_have_text("The model calls weather.")
    script(engine, "</think>Sunny.")
    page.get_by_label("Result of weather").fill("25 degrees")
    page.get_by_role("button", name="Send results").click()

    expect(messages(page).last.locator(".prose")).to_have_text("Sunny.")
    asked, result = bodies[1]["messages"][1:]
    (wire_call,) = asked["tool_calls"]
    assert wire_call["function"]["arguments"] == '{"city": "Hangzhou"}'
    assert asked["reasoning_content"] == "I need a tool."
    assert result == {"role": "tool", "tool_call_id": wire_call["id"], "content": "25 degrees"}
    assert "25 degrees" in engine.tokenizer.decode(engine.submitted[1].prompt_token_ids)


def test_conversations_survive_a_reload_and_can_be_exported_and_deleted(page: Page) -> None:
    send(page, "Remember me")
    finished(page)
    page.reload()
    page.get_by_role("button", name="Remember me", exact=True).click()
    expect(messages(page)).to_have_count(2)

    with page.expect_download() as download:
        page.get_by_role("button", name="Export Remember me").click()
    exported = json.loads(download.value.path().read_text())
    assert exported["title"] == "Remember me"
    assert sorted(node["role"] for node in exported["nodes"].values()) == ["assistant", "user"]

    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete Remember me").click()
    expect(messages(page)).to_have_count(0)
    page.reload()
    expect(page.get_by_role("button", name="New conversation")).to_be_visible()
    expect(page.get_by_role("button", name="Remember me", exact=True)).to_have_count(0)


def test_hostile_markdown_runs_nothing_and_asks_nobody(page: Page, engine: FakeEngine) -> None:
    hostile = (
        "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>"
        "<style>body{display:none}</style>\n\n![pixel](http://127.0.0.1:9/leak.png)\n\n"
        "[go](javascript:window.hacked=1) <form action=/x><button>b</button></form>\n\n"
        "```html\n<b>safe</b>\n```\n"
    )
    script(engine, hostile)
    send(page, "attack")
    finished(page)

    prose = messages(page).nth(1).locator(".prose")
    expect(prose).to_contain_text("onerror=window.hacked=1")  # shown as text
    expect(prose.locator("img, script, style, form, a[href^=javascript]")).to_have_count(0)
    expect(prose.locator("pre")).to_have_text("<b>safe</b>\n")
    expect(prose.get_by_role("link", name="pixel")).to_have_attribute("rel", "noopener noreferrer")
    assert page.evaluate("window.hacked") is None


def test_code_is_copied(browser: Browser, engine: FakeEngine) -> None:
    allowed = ["clipboard-read", "clipboard-write"]
    with page_of(browser, engine, permissions=allowed) as page:
        script(engine, "```python\nx = 1\n```")
        send(page, "code")
        finished(page)
        page.locator(".code").get_by_role("button", name="Copy").click()

        expect(page.locator(".code").get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == "x = 1\n"


def test_a_server_with_keys_asks_for_one(browser: Browser, engine: FakeEngine) -> None:
    with page_of(browser, engine, "sesame") as page:
        page.get_by_label("This server asks for an API key.").fill("wrong")
        page.get_by_role("button", name="Use key").click()
        page.get_by_label("The server refused this API key.").fill("sesame")
        page.get_by_role("button", name="Use key").click()
        expect(page.get_by_role("button", name="Use key")).to_have_count(0)
        send(page, "hi")
        finished(page)

        assert "sesame" in page.evaluate("JSON.stringify(sessionStorage)")
        assert "sesame" not in page.evaluate("JSON.stringify(localStorage)")


def test_shift_enter_starts_a_line_and_enter_sends(page: Page) -> None:
    page.get_by_label("Message", exact=True).press_sequentially("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert messages(page).count() == 0
    page.keyboard.press("Enter")

    expect(messages(page).first.locator(".bubble")).to_have_text("one\ntwo")
    finished(page)


def test_a_question_may_come_before_the_page_knows_its_model(
    page: Page, engine: FakeEngine
) -> None:
    page.route("**/cluster*", lambda route: None)  # never answered
    page.reload()
    send(page, "hi")
    finished(page)
    assert len(engine.submitted) == 1
    page.unroute_all(behavior="ignoreErrors")


def test_every_stop_of_the_tab_key_is_visible(page: Page) -> None:
    send(page, "hi")
    finished(page)
    names = set()
    for _ in range(20):
        page.keyboard.press("Tab")
        focused = page.evaluate(
            """() => { const e = document.activeElement; const s = getComputedStyle(e);
            return [e.tagName, e.getAttribute("aria-label") || e.textContent.trim().slice(0, 20),
                    s.outlineStyle, e.getBoundingClientRect().width]; }"""
        )
        if focused[0] != "BODY":
            assert focused[2] != "none", focused
            assert focused[3] > 0, focused
            names.add(focused[1])
    assert {"Chat", "Board", "Settings", "Edit", "Regenerate"} <= names


def test_the_board_shows_what_the_engine_says(page: Page, engine: FakeEngine) -> None:
    page.clock.install()
    page.goto("/#board")
    page.reload()
    tile = page.locator(".tile", has_text="Running")
    expect(tile).to_contain_text("0")
    engine.stats = Stats(
        num_running=5, num_waiting=2, num_blocks=100, num_owned_blocks=40, num_free_blocks=35,
        num_cached_blocks=25, prefix_cache_queries_tokens=200, prefix_cache_hits_tokens=50,
        generation_tokens=900,
    )  # fmt: skip
    page.clock.run_for(1100)

    expect(tile).to_contain_text("5")
    expect(page.locator(".tile", has_text="Waiting")).to_contain_text("2")
    expect(page.locator(".tile", has_text="Prefix hits")).to_contain_text("25%")
    expect(page.locator(".tile", has_text="Generation")).not_to_contain_text("–")
    expect(page.locator(".legend.tall")).to_contain_text("owned by requests 40")
    expect(page.locator(".plot canvas")).to_have_count(4)
    expect(page.get_by_text("does not count tokens per expert")).to_be_visible()
    expect(page.get_by_text("No drafts so far")).to_be_visible()


def test_the_board_draws_drafts_and_experts_when_there_are_any(page: Page) -> None:
    def answer(route: Route) -> None:
        board = route.fetch().json()
        board["speculation"] = {"num_drafts": 200, "accepted_by_position": [160, 90]}
        board["experts"] = {"tokens": [[1, 1, 1, 1], [4, 0, 0, 0]]}
        route.fulfill(json=board)

    page.route("**/cluster", answer)
    page.goto("/#board")

    expect(page.locator(".bars li")).to_have_text(["180%", "245%"])
    expect(page.get_by_text("2.25 tokens a step")).to_be_visible()
    heat = page.get_by_role("img", name="2 layers, 4 experts each")
    expect(heat).to_have_accessible_name(
        "2 layers, 4 experts each; the busiest expert gets 4.0 times an even share"
    )
    pixels = "canvas => [...canvas.getContext('2d').getImageData(0, 1, 2, 1).data]"
    _, _, _, alpha, *_, second_alpha = heat.evaluate(pixels)
    assert alpha == 255
    assert second_alpha < 20


def test_the_board_shows_ranks_placements_and_moves_of_experts(page: Page) -> None:
    def answer(route: Route) -> None:
        board = route.fetch().json()
        board["experts"] = {
            "num_ranks": 2, "slots": [[0, 1, 2, 0], [0, 1, 2, 1]], "tokens": [[6, 2, 1], [0, 0, 0]],
            "plans": [[50, 0.5, 0.75, 3], [100, 0.6, 0.9, 2]],
            "moved": [[0, 0, 0, 1], [1, 1, 0, 1], [1, 2, 1, 1]],
        }  # fmt: skip
        route.fulfill(json=board)

    page.route("**/cluster", answer)
    page.goto("/#board")

    expect(page.locator(".bars.ranks li b")).to_have_text(["1.11", "0.89"])
    expect(page.get_by_text("step 100: 0.60 → 0.90, 2 slots to change")).to_be_visible()
    arrows = page.get_by_role("img", name="moves between ranks")
    expect(arrows).to_have_accessible_name("moves between ranks: 0 → 1 (2)")
    expect(arrows.locator("path.right")).to_have_count(1)


def test_a_hidden_tab_asks_for_nothing(page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda r: r.url.endswith("/cluster") and asked.append(r.url))
    page.clock.install()
    page.reload()
    expect(page.locator(".welcome p")).to_be_visible()

    def set_hidden(hidden: bool) -> None:
        page.evaluate(
            """hidden => { Object.defineProperty(document, "hidden",
                {configurable: true, get: () => hidden});
                document.dispatchEvent(new Event("visibilitychange")); }""",
            hidden,
        )

    set_hidden(True)
    before = len(asked)
    page.clock.run_for(10_000)
    assert len(asked) == before
    set_hidden(False)
    with page.expect_request("**/cluster"):
        page.clock.run_for(1100)


def test_the_switch_of_colours_is_remembered(page: Page) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    for _ in range(2):
        page.get_by_role("button", name="Colours").click()
    dark = page.evaluate(ground)
    page.reload()
    expect(page.get_by_role("button", name="Colours: dark")).to_be_visible()

    assert page.evaluate(ground) == dark != light


def test_nothing_is_wider_than_a_small_telephone(browser: Browser, engine: FakeEngine) -> None:
    with page_of(browser, engine, viewport=NARROW) as page:
        script(engine, "word " * 60 + "\n\n```\n" + "x" * 300 + "\n```\n\n" + "y" * 200)
        send(page, "z" * 300)
        finished(page)
        for view in VIEWS:
            show(page, view)
            assert page.evaluate("document.documentElement.scrollWidth") == NARROW["width"], view
            assert page.evaluate(TOO_WIDE) == [], view


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [NARROW["width"], 1200])
def test_axe_finds_nothing_serious(
    browser: Browser, engine: FakeEngine, scheme: str, width: int
) -> None:
    viewport = {"width": width, "height": 800}
    with page_of(browser, engine, color_scheme=scheme, viewport=viewport) as page:
        script(
            engine, "# Title\n\nText with `code` and\n\n```python\nx\n```\n\n| a |\n| - |\n| 1 |"
        )
        send(page, "hello")
        finished(page)
        page.evaluate(AXE)
        for view in VIEWS:
            show(page, view)
            violations = page.evaluate("axe.run().then(result => result.violations)")
            serious = [v for v in violations if v["impact"] in ("serious", "critical")]
            assert [(v["id"], [n["html"][:200] for n in v["nodes"]]) for v in serious] == [], view


def show(page: Page, view: str) -> None:
    """Go on to a view; to be called in the order of VIEWS."""
    match view:
        case "settings":
            page.get_by_role("button", name="Settings").click()
        case "list":
            page.keyboard.press("Escape")
            if (button := page.get_by_role("button", name="Conversations")).is_visible():
                button.click()
            expect(page.get_by_role("button", name="New conversation")).to_be_visible()
        case "board":
            page.get_by_role("link", name="Board").click()
            expect(page.locator(".tile")).to_have_count(6)
