"""Stop strings end a text where they would if it came one character at a time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokentight.engine.stop_strings import StopStringMatcher

# Few letters, so that stop strings overlap the text, themselves and one another.
texts = st.text(alphabet="ab€", max_size=24)
stops = st.lists(st.text(alphabet="ab€", min_size=1, max_size=5), max_size=4).map(tuple)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


def oracle(text: str, stop: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """Search the growing text with `endswith`."""
    for end in range(1, len(text) + 1):
        ended = [s for s in stop if text[:end].endswith(s)]
        if ended:
            matched = max(ended, key=len)
            return text[: end if include else end - len(matched)], matched
    return text, None


@given(texts, stops, st.lists(st.integers(0, 24), max_size=8), st.booleans())
@example("ab", ("abb", "b"), [1], False)
@example("aab", ("ab", "aab"), [1, 2], False)
@example("ababa€", ("aba€",), [3], False)
@example("abab", ("babb", "ab€"), [1, 2, 3], True)
def test_any_split_equals_a_search_of_the_whole_text(
    text: str, stop: tuple[str, ...], cuts: list[int], include: bool
) -> None:
    """The shown text, the match, and that no more is held back than must be."""
    expected, expected_match = oracle(text, stop, include)
    matcher = StopStringMatcher(stop, include)
    shown, seen, matched = "", "", None
    for piece in pieces_of(text, cuts):
        emitted, matched = matcher.push(piece)
        shown, seen = shown + emitted, seen + piece
        if matched is not None:
            break
        begun = [seen[i:] for i in range(len(seen)) if any(s.startswith(seen[i:]) for s in stop)]
        assert shown == seen[: len(seen) - len(max(begun, key=len, default=""))]
    shown += matcher.flush()
    assert (shown, matched) == (expected, expected_match)


def test_without_stop_strings_all_text_passes_at_once() -> None:
    matcher = StopStringMatcher((), False)
    assert matcher.push("anything") == ("anything", None)
    assert matcher.flush() == ""


def test_text_held_back_is_shown_when_it_was_no_stop_string() -> None:
    matcher = StopStringMatcher(("\n\nUser:",), False)
    assert matcher.push("Yes.\n") == ("Yes.", None)
    assert matcher.push("\nUs") == ("", None)
    assert matcher.push("e it") == ("\n\nUse it", None)
    assert matcher.push("\n\nUser") == ("", None)
    assert matcher.flush() == "\n\nUser"


@pytest.mark.parametrize(("include", "shown"), [(False, "1, 2"), (True, "1, 2 END")])
def test_the_stop_string_is_kept_only_when_asked(include: bool, shown: str) -> None:
    matcher = StopStringMatcher((" END",), include)
    first, matched = matcher.push("1, 2 E")
    assert matched is None
    second, matched = matcher.push("ND and more")
    assert matched == " END"
    assert first + second == shown
    assert matcher.flush() == ""


def test_nothing_may_follow_a_match() -> None:
    matcher = StopStringMatcher(("x",), False)
    matcher.push("x")
    with pytest.raises(ValueError, match="ended with stop string 'x'"):
        matcher.push("y")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStringMatcher(("a", ""), False)
