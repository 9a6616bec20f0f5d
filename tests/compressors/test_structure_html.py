"""HTML to text: what stays of a page, what goes, and what is no page."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from promptsluice.compressors import CompressionContext, create
from promptsluice.compressors.structure.html import is_page, text_of
from promptsluice.prompt import Prompt, PromptsluiceError

Make = Callable[..., CompressionContext]
PromptOf = Callable[..., Prompt]
TextsOf = Callable[[Prompt], list[str]]

PAGE = """<!DOCTYPE html>
<html><head><title>Prices</title><style>p { color: red }</style></head>
<body><script>track("me")</script>
<h2>Rooms &amp; prices</h2>
<p>A room
   costs <b>$120</b> a&nbsp;night, see <a href="/terms?a=1">the terms</a> or <a href="#top">go up</a>.</p>
<ul><li>Breakfast: 8&nbsp;€</li><li><p>Parking</p></li></ul>
<table><tr><th>Room</th><th>Beds</th></tr><tr><td>Blue</td><td>2</td></tr></table>
<pre>
def f():
    return 1

</pre><img src="x.png" alt="the house"><!-- never shown -->
</body></html>
"""


def test_the_text_of_a_page() -> None:
    assert text_of(PAGE) == (
        "Prices\n\n## Rooms & prices\n\nA room costs $120 a\xa0night, see [the terms](/terms?a=1) or go up.\n\n"
        "- Breakfast: 8\xa0€\n- Parking\n\n| Room | Beds\n| Blue | 2\n\ndef f():\n    return 1\n\n[image: the house]"
    )
    assert "see the terms or go up" in text_of(PAGE, links=False)


def test_pages_become_text_and_the_rest_stays(context: Make, prompt_of: PromptOf, tool_texts: TextsOf) -> None:
    others = ["A text about <b>HTML</b> and </b>.", '<?xml version="1.0"?><a><b>1</b></a>', "<p> is a tag"]
    once = create("html").compress(prompt_of(PAGE, *others), context=context())
    assert tool_texts(once.prompt) == [text_of(PAGE), *others]
    assert tool_texts(create("html").compress(once.prompt, context=context()).prompt) == [text_of(PAGE), *others]


@pytest.mark.parametrize("page", ["<div><script>only()</script></div>", "<p>&lt;div&gt;x&lt;/div&gt;</p>"])
def test_a_page_without_a_text_of_its_own_stays(
    context: Make, prompt_of: PromptOf, tool_texts: TextsOf, page: str
) -> None:
    done = create("html").compress(prompt_of(page), context=context())
    assert tool_texts(done.prompt) == [page]
    assert "without a text of its own" in done.note and not done.trouble


@pytest.mark.slow
def test_what_nests_without_limit_stays(context: Make, prompt_of: PromptOf, tool_texts: TextsOf) -> None:
    page = "<div>" + "<b></i>" * 100_000
    with pytest.raises(PromptsluiceError):
        text_of(page)
    done = create("html").compress(prompt_of(page), context=context())
    assert tool_texts(done.prompt) == [page]
    assert "html failed" in done.note


PARTS = [*"<>/ab \n\"='&;é\0", "<p>", "</p>", "<a href=x>", "<pre>", "</div>", "<td>", "<!--"]


@given(st.lists(st.sampled_from(PARTS)))
def test_any_page_gives_the_same_text_every_time(parts: list[str]) -> None:
    page = "<div>" + "".join(parts) + "</div>"
    assert is_page(page)
    assert text_of(page) == text_of(page)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["<p>word</p>", "<!--", "<a ", "</", "<script>", "&", "<td>1", "<p a='"])
def test_a_megabyte_of_a_page_is_no_trouble(part: str) -> None:
    try:
        assert isinstance(text_of("<div>" + part * (1_000_000 // len(part))), str)
    except PromptsluiceError as error:
        assert "nested too deep" in error.message
