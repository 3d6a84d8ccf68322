"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator


class StopStringMatcher:
    """Finds the first stop string in a text, whatever pieces the text comes in.

    The rule is that of text arriving one character at a time: the first character that completes
    a stop string ends the text. Where it completes several at once, the longest of them, which
    starts earliest, is the match; they end alike, so no other order could tell them apart.
    The text is cut where the match starts, or behind it where stop strings are kept in the output.

    Text that may yet turn out to be the beginning of a stop string is held back, and no other.
    Each character is looked at once (A. Aho, M. Corasick, "Efficient string matching", 1975).
    """

    def __init__(self, stop: tuple[str, ...], include_in_output: bool) -> None:
        """Raises ValueError if a stop string is empty."""
        if not all(stop):
            raise ValueError("a stop string must not be empty")
        self._include_in_output = include_in_output
        self._automaton = _Automaton(stop)
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string that ended it, if one has.

        Raises:
            ValueError: after a match: nothing may follow it.
        """
        if self._matched is not None:
            raise ValueError(f"the text has ended with stop string {self._matched!r}")
        automaton, state = self._automaton, self._state
        for index, character in enumerate(text):
            state = automaton.step(state, character)
            matched = automaton.longest_match[state]
            if matched is not None:
                return self._end(self._held + text[: index + 1], matched), matched
        self._state = state
        text = self._held + text
        num_shown = len(text) - automaton.depth[state]
        self._held = text[num_shown:]
        return text[:num_shown], None

    def flush(self) -> str:
        """The text held back, once no more can come."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _end(self, text: str, matched: str) -> str:
        self._matched = matched
        self._held = ""
        return text if self._include_in_output else text[: len(text) - len(matched)]


class _Automaton:
    """The trie of all stop strings with failure links. State 0 is its root.

    `depth[s]` is the length of the longest end of the text so far that begins a stop string;
    `longest_match[s]` the longest stop string that ends here.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._failure = [0]
        self.depth = [0]
        self.longest_match: list[str | None] = [None]
        for string in strings:
            self.longest_match[self._add(string)] = string
        for parent, character, state in self._breadth_first():
            # The longest proper end of this state's text that is in the trie too.
            fallback = self.step(self._failure[parent], character) if parent else 0
            self._failure[state] = fallback
            if self.longest_match[state] is None:
                self.longest_match[state] = self.longest_match[fallback]

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while True:
            child = self._children[state].get(character)
            if child is not None:
                return child
            if state == 0:
                return 0
            state = self._failure[state]

    def _add(self, string: str) -> int:
        state = 0
        for character in string:
            child = self._children[state].get(character)
            if child is None:
                child = len(self._children)
                self._children.append({})
                self._failure.append(0)
                self.depth.append(self.depth[state] + 1)
                self.longest_match.append(None)
                self._children[state][character] = child
            state = child
        return state

    def _breadth_first(self) -> Iterator[tuple[int, str, int]]:
        queue = deque([0])
        while queue:
            parent = queue.popleft()
            for character, state in self._children[parent].items():
                yield parent, character, state
                queue.append(state)
