"""Ends a stream of text at the first of some strings, wherever the pieces of the stream are cut."""

from collections.abc import Sequence


class StopStrings:
    r"""Looks for stop strings in text that comes in pieces, and holds back what may turn out to be the start of one.

    The stop string that is complete first ends the text; of two that end at the same character, the longer one. So the
    result does not depend on how the text was cut. One automaton a string (Knuth, Morris and Pratt, 1977): the work
    for a character does not grow with the text.

    Attributes:
      matched: the stop string that ended the text, or None.

    Raises:
      TypeError: something in ``stop`` is no string.
      ValueError: an empty stop string.

    Example:
      >>> stop = StopStrings(["\nUser:"])
      >>> stop.push("Paris.\nUs"), stop.push("er: and"), stop.matched
      (('Paris.', False), ('', True), '\nUser:')
    """

    def __init__(self, stop: str | Sequence[str] = ()):
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        for string in strings:
            if not isinstance(string, str):
                raise TypeError(f"stop: expected strings, got {string!r:.80}.")
            if not string:
                raise ValueError("stop: expected non-empty strings, got ''; every text contains it.")
        # Longest first, so that the longer of two matches that end together is the one found.
        self._strings = sorted(set(strings), key=lambda string: (-len(string), string))
        self._fallbacks = [_fallbacks(string) for string in self._strings]
        self._start()

    def push(self, text: str) -> tuple[str, bool]:
        """Takes more text.

        Returns:
          The text that is certain not to belong to a stop string, and whether a stop string has been found. After
          that, all further text is dropped.
        """
        if self.matched is not None:
            return "", True
        known = self._held + text
        for end in range(len(self._held), len(known)):
            self._advance(known[end])
            for string, state in zip(self._strings, self._states, strict=True):
                if state == len(string):
                    self.matched, self._held = string, ""
                    return known[: end + 1 - state], True
        keep = len(known) - max(self._states, default=0)
        self._held = known[keep:]
        return known[:keep], False

    def flush(self) -> str:
        """Ends the text: returns what was held back. Ready for another text."""
        held = self._held
        self._start()
        return held

    def _start(self) -> None:
        self.matched: str | None = None
        self._held = ""
        self._states = [0] * len(self._strings)  # how much of each string the end of the text matches

    def _advance(self, character: str) -> None:
        for i, (string, fallbacks) in enumerate(zip(self._strings, self._fallbacks, strict=True)):
            state = self._states[i]
            while state and string[state] != character:
                state = fallbacks[state - 1]
            self._states[i] = state + (string[state] == character)


def _fallbacks(string: str) -> list[int]:
    """For each prefix, the length of its longest proper suffix that is a prefix of ``string``."""
    lengths = [0]
    for character in string[1:]:
        length = lengths[-1]
        while length and string[length] != character:
            length = lengths[length - 1]
        lengths.append(length + (string[length] == character))
    return lengths
