"""Words that tasks draw from."""

import functools
import re
from collections.abc import Iterator

from quest_jax.evals.needle import shipped_text

# No adjective ends with another and no noun begins with another: a pair is then no part of another pair, and an answer
# that names one pair does not name two.
ADJECTIVES = tuple(
    """
    amber ancient arctic awkward blunt bold bouncy brave brisk bumpy candid careful cheerful chilly clever cloudy
    clumsy cosy crisp curious curly damp dapper dazzling distant dizzy dusty eager elegant empty fancy fearless fierce
    fluffy foggy fragile frosty frozen fuzzy gentle giddy glossy graceful grumpy hasty hollow honest humble hungry
    idle itchy jolly jumpy keen lanky lazy lively lonely loud lucky mellow mighty modest muddy narrow nimble noisy
    peculiar plump polite proud purple puzzled quaint quick quiet rapid rusty salty shaggy sharp shiny silent sleepy
    slim smooth sour speedy spicy stubborn sturdy sunny swift tender thirsty tidy tiny velvet vivid wavy witty wobbly
    young zesty
    """.split()
)
NOUNS = tuple(
    """
    acorn anvil apron balloon banjo barrel basket beacon beetle blanket bonnet bottle bracelet bridge bucket button
    cabbage cactus camera candle canyon carpet castle cello chimney cobweb compass cottage cradle cricket crystal
    cushion dolphin dragon drawer easel elbow emerald engine falcon feather fiddle fountain garlic giraffe glacier
    goblet guitar hammer harbor hazelnut helmet igloo insect island jacket jigsaw kettle kitten ladder lantern lemon
    lizard lobster magnet mailbox meadow mitten mirror mustard napkin needle nutmeg octopus orchard otter oyster paddle
    pancake parrot peanut pebble pelican pickle pigeon pillow pumpkin puppet quilt rabbit raccoon ribbon rocket saddle
    sandal scarf shovel spider stapler sunset teapot thimble ticket tractor trumpet tulip tunnel turnip umbrella valley
    violet wagon walnut whistle window wizard yogurt zipper
    """.split()
)


@functools.cache
def pairs() -> tuple[str, ...]:
    """Every adjective with every noun, as in ``curious-teapot``."""
    return tuple(f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS)


@functools.cache
def prose_words() -> tuple[str, ...]:
    """The words of the shipped prose, 4 to 10 letters in lower case.

    Without those that contain another one, and those that a pair contains: an answer is searched for words as it is.
    """
    found = set(re.findall(r"(?<![\w'-])[a-z]{4,10}(?![\w'-])", shipped_text()))
    of_pairs = {part for word in (*ADJECTIVES, *NOUNS) for part in _parts(word)}
    return tuple(
        sorted(word for word in found - of_pairs if not any(part != word and part in found for part in _parts(word)))
    )


def _parts(word: str) -> Iterator[str]:
    """Every run of at least four letters."""
    return (word[i:j] for i in range(len(word)) for j in range(i + 4, len(word) + 1))
