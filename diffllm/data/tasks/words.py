"""Words and phrases of the built-in tasks."""

from itertools import product


def words_in(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# The order of all words and phrases is part of the tasks: random draws are indices, so another
# order would change the examples. Most tokenizers of English text or source code encode each word
# of KEY_WORDS, VALUES and FILLER as one token.
KEY_WORDS = words_in("""
    arg base block byte case child class code command data dir element error event file format frame
    handler header line list loop message method mode module name node number object path print
""")
VALUES = words_in("""
    count current default dict first float given int lambda last local max memory mock next offset
    option output range result server set sign size socket source state string text thread time
    tuple
""")
FILLER = words_in("""
    add after all and any are but can does for from get have into more must not one only other over
    same should some than that the then this was when with
""")
CONSONANTS, VOWELS = "bdfghjklmnprstvwyz", "aeiou"
SYLLABLES = tuple("".join(pair) for pair in product(CONSONANTS, VOWELS))
SUBJECTS = (
    "The old man",
    "A small bird",
    "The tall tree",
    "My sister",
    "The green boat",
    "A quiet dog",
    "The long road",
    "Our teacher",
    "The cold rain",
    "A bright star",
)
VERBS = (
    "goes to",
    "looks at",
    "waits for",
    "thinks of",
    "moves past",
    "stands near",
    "turns from",
    "sings about",
    "sleeps by",
    "comes back to",
)
OBJECTS = (
    "the river",
    "the market",
    "an open door",
    "the hill",
    "the stone wall",
    "a garden",
    "the sea",
    "the last house",
    "the field",
    "a window",
)
LABELS = (("red", "blue"), ("A", "B"), ("foo", "bar"), ("yes", "no"))
"""Names of the two labels of many-shot classification; an example uses one pair."""
