"""The language of an answer, as far as its letters and its most frequent words tell it.

The script of most letters tells Chinese, Japanese, Korean and Russian from each other and from Latin. It does not tell
Russian from Ukrainian. Among six languages in Latin letters, frequent words decide: English, German, French, Spanish,
Portuguese and Italian. A text with few of them, or in two of them, stays "Latin"; so does most text in another such
language, but Romanian may count as Spanish. A short text in Han letters alone stays "Han": it may be Japanese. Code
does not count: its words are English in any language.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

# names of scripts as Unicode begins the names of their letters
SCRIPTS = {"CJK": "Han", "HIRAGANA": "Japanese", "KATAKANA": "Japanese", "FULLWIDTH": "Latin"}
LATIN, HAN = "Latin", "Han"
# Japanese is mostly Han in some sentences; Chinese has no kana but in names
KANA = 0.1
# a text of so many Han letters without kana is Chinese
CHINESE_LETTERS = 20
# one letter may be a symbol in a formula
FEWEST_LETTERS = 2
WORDS = {
    "English": "the and of to is are was with that for this it you your not have be on what which how from they can",
    "German": "der die das und ist nicht ein eine einen mit zu den dem für auf von sich wie auch ich du sie es sind",
    "French": "le les des et est une un dans que qui pour pas sur avec du au ce il vous je sont la de en plus par",
    "Spanish": "el los las y es una un en que por con para no se del al lo su como más la de qué son esta este hay muy",
    "Portuguese": "o os as e é uma um em que por com para não se do da no na dos como mais de ao são você esta ou seu",
    "Italian": "il lo gli e è una un in che per con non si del della di la le dei sono come più questa al ha nel o da",
}
# scripts that do not decide a language, and the languages that may be behind them
UNDECIDED = {LATIN: {*WORDS}, HAN: {"Chinese", "Japanese"}}
FREQUENT = {language: frozenset(words.split()) for language, words in WORDS.items()}
CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]+`", re.DOTALL)
WORD = re.compile(r"[^\W\d_]+")
# hits of the language that leads: this many at least, and this many more than of the next
FEWEST_HITS, AHEAD = 3, 1.3


def language_of(text: str) -> str:
    """Return the name of a language, or of a script that does not decide it; empty without letters outside code."""
    text = CODE.sub(" ", text)
    letters = Counter(script_of(letter) for letter in text if letter.isalpha())
    if letters.total() < FEWEST_LETTERS:
        return ""
    if letters["Japanese"] > KANA * (letters[HAN] + letters["Japanese"]):
        letters["Japanese"] += letters.pop(HAN, 0)
    script = max(letters, key=lambda name: letters[name])
    if script == HAN and letters[HAN] >= CHINESE_LETTERS:
        return "Chinese"
    return _by_words(text) if script == LATIN else script


def are_different(one: str, other: str) -> bool | None:
    """Return if two texts are in two languages, given what `language_of` says of each; None if that is open."""
    pair = {one, other}
    if "" in pair or any(script in pair and pair <= {script, *languages} for script, languages in UNDECIDED.items()):
        return None
    return one != other


def script_of(letter: str) -> str:
    """Return the name of a letter's script."""
    first = unicodedata.name(letter, "UNKNOWN").split()[0]
    return SCRIPTS.get(first, first.capitalize())


def _by_words(text: str) -> str:
    words = WORD.findall(text.lower())
    hits = {language: sum(word in frequent for word in words) for language, frequent in FREQUENT.items()}
    next_best, best = sorted(hits.values())[-2:]
    if best < FEWEST_HITS or best < AHEAD * next_best:
        return LATIN
    return max(hits, key=lambda language: hits[language])
