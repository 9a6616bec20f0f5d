"""What protection finds, in which scripts, and that hostile input costs no more than its length."""

import itertools

import pytest
from promptsluice.compressors import protected_spans


def found(text: str) -> list[str]:
    return [text[start:end] for start, end in protected_spans(text)]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("It costs $48,750 a year.", "$48,750"),
        ("It weighs 3.5 kg today.", "3.5 kg"),
        ("A drop of 12.5% since.", "12.5%"),
        ("Wait 300ms or so.", "300ms"),
        ("花了30元。", "30元"),
        ("他在2024年3月5日来。", "2024年3月5日"),
        ("في عام ٢٠٢٤ كان", "٢٠٢٤"),
        ("Since 2024-05-15T15:00:00Z it runs.", "2024-05-15T15:00:00Z"),
        ("On May 20th, 2024 we met.", "May 20th, 2024"),
        ("At 3:45 pm sharp.", "3:45 pm"),
        ("See https://example.com/a?b=c#d, please.", "https://example.com/a?b=c#d"),
        ("Mail jane.doe+x@mail.example.org now.", "jane.doe+x@mail.example.org"),
        ("User mia_li_3668 called.", "mia_li_3668"),
        ("Then getUserName runs.", "getUserName"),
        ("Then 调用getUserName函数。", "getUserName"),
        ("Set os.path.join here.", "os.path.join"),
        ("Use std::vector there.", "std::vector"),
        ("Open /etc/hosts and go.", "/etc/hosts"),
        ("Open src/main/app.py and go.", "src/main/app.py"),
        (r"Open C:\Users\me\x.txt and go.", r"C:\Users\me\x.txt"),
        ("Version v1.2.3-rc1 is out.", "v1.2.3-rc1"),
        ("Id 9f1c2d3e-1111-2222-3333-444455556666 it is.", "9f1c2d3e-1111-2222-3333-444455556666"),
        ("Commit c3f316b7e814667e8ee81e03a7330d00ee61e45c broke it.", "c3f316b7e814667e8ee81e03a7330d00ee61e45c"),
        ("Run it with --dry-run=yes now.", "--dry-run=yes"),
        ('She said "do not ever delete it" twice.', '"do not ever delete it"'),
        ("他说「不要删除」两次。", "「不要删除」"),
        ("Call `x = 1` first.", "`x = 1`"),
        ("A look-alike <|endoftext|> here.", "<|endoftext|>"),
        ('The answer {"a": [1, 2], "b": null} came.', '{"a": [1, 2], "b": null}'),
        ('Cut off: {"a": [1, 2], "b": {"c": "d', '{"a": [1, 2], "b": {"c":'),
        ("See [the docs](https://example.com/x) again.", "[the docs](https://example.com/x)"),
    ],
)
def test_inline(text: str, wanted: str) -> None:
    assert any(wanted in item for item in found(text)), found(text)
    assert found("Some words without anything of note, as they say; nothing more!") == []


@pytest.mark.parametrize(
    "block",
    [
        "```python\nfor word in words:\n\n    pass\n```",
        "    indented code\n\n    after a blank line",
        "a.py:10:def load(payload):\na.py-11-    env_map = dict(e.split('=') for e in payload)\na.py-12-    return it",
        "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n-old words\n+new words\n same words",
        'Traceback (most recent call last):\n  File "x.py", line 3, in go\n    call it now\nValueError: such a thing',
        "    at com.example.Main.run(Main.java:10)\n    at com.example.Main.main(Main.java:3)",
        "def go(there):\n    return there + 1",
        "| name | value |\n|------|-------|\n| words | words |",
        "$ make all the things",
        'fruit,colour,taste\nplum,blue,sweet\nlemon,yellow,sour\n"grape, seedless",green,sweet\nfig,brown,sweet',
        "fruit\tcolour\nplum\tblue\nlemon\tyellow\nfig\tbrown",
        "name: some value\nother: other value\nthird: third value",
        "[repeat: the same 512 characters as earlier, from “Once upon” to “the end”]",
    ],
)
def test_blocks_are_found_whole(block: str) -> None:
    text = f"Some prose comes before it all\n\n{block}\n\nand some prose after it."
    assert any(block in item for item in found(text)), found(text)


def test_verses_with_commas_are_no_table() -> None:
    verses = ["The night is long, the day is near, they say,", "The road is open, wide and clear,"]
    verses += ["And all who sing, will sing again,", "Of summer, sun, and falling rain, of rain."]
    assert found("\n".join(verses)) == []


def test_prose_in_many_scripts_is_free() -> None:
    for text in (
        "Wir gehen heute nach Hause.",
        "我们今天回家。",
        "今日は家に帰ります。",
        "نعود إلى البيت اليوم.",
        "Идём домой 🙂.",
    ):
        assert found(text) == []


def test_categories_can_be_chosen() -> None:
    text = "Pay $5 for `this` at https://example.com now."
    spans = protected_spans(text, categories={"number"})
    assert [text[start:end] for start, end in spans] == ["$5"]


def test_marked_text_is_kept_whatever_the_categories() -> None:
    text = "Some free words <keep>these words, too\n\nand these</keep> free again <keep> all that is left"
    spans = protected_spans(text, categories=())
    assert [text[start:end] for start, end in spans] == [
        "<keep>these words, too\n\nand these</keep>",
        "<keep> all that is left",
    ]
    assert not protected_spans("an end </keep> without its begin", categories={"number"})


def test_remarks_of_a_transcript_are_no_placeholders() -> None:
    turns = "Ann: well {pause} we {laughter} could {pause} try. Bob: no {pause} and {gap} never."
    assert found(turns) == ["{laughter}", "{gap}"]
    letter = "Dear {name}, we thank you, {name}, for {thing}. Yours, {name}"
    assert found(letter).count("{name}") == 3
    alone = "Hello {name} , your order {name} ships to {name} today"
    assert found(alone) == ["{name}"] * 3, "only words for what is heard are remarks"
    assert found("Ann: well {pause}\nBob: no {pause}\nAnn: {pause}") == [], "lines that end so are no code"
    glued = "The paths are /a/{gap} and /b/{gap} and then {gap} and {gap} and {gap} alone."
    assert found(glued).count("{gap}") == 3


def test_names_with_underscores_at_their_ends_are_whole() -> None:
    assert found("Call __init__ with class_ or T_V_'s here.") == ["__init__", "class_", "T_V_"]
    assert found("See _https://example.com/x_ there.") == ["_https://example.com/x_"]


@pytest.mark.parametrize(
    "url", ["link_https://example.com/a?q=one&b=two", "___https://example.com/a?q=one___",
            "x_data:image/png;base64,AAAA+BBB/cc==", f"{'long_' * 40}www.example.com/a?q=one,two"],
)  # fmt: skip
def test_urls_behind_underscores_are_whole(url: str) -> None:
    assert found(f"see {url} there") == [url]
    assert found(f"see {url}, there") == [url]


HOSTILE = {
    "letters": "a" * 300_000,
    "spaces": " " * 300_000,
    "ticks": "`" * 300_000,
    "quotes": '"a' * 150_000,
    "brackets": "[" * 300_000,
    "objects": '{"a":' * 60_000,
    "dashes": "a-" * 150_000,
    "dots": "a." * 150_000,
    "slashes": "/a" * 150_000,
    "ats": "a@" * 150_000,
    "digits": "1," * 150_000,
    "tags": "<a" * 150_000,
    "marks": "<keep>" * 50_000,
    "handles": "@" * 300_000,
    "plus": "a+" * 150_000,
    "homes": "~a" * 150_000,
    "rules": "-" * 300_000,
    "flags": "--a" * 100_000,
    "colons": ":" * 300_000,
    "links": "[a](" * 75_000,
    "lines": "\n" * 300_000,
    "chinese": "中文字符" * 75_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_input_ends_and_gives_proper_spans(name: str) -> None:
    # Not timed: a pattern that takes quadratic time on one of these takes hours, and no run of the suite would end.
    text = HOSTILE[name]
    spans = protected_spans(text)
    assert all(0 <= start < end <= len(text) for start, end in spans)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(spans))
