"""Candidates for probes: short prompts of which a small base may know the answer. Chosen are those that it answers.

Questions about facts have no answer here: what counts is what the base is sure to say, right or wrong.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from scale_surgery.evidence.probe_file import Probe

COUNTRIES = (
    "Argentina", "Australia", "Austria", "Belgium", "Brazil", "Canada", "Chile", "China", "Colombia", "Croatia",
    "Cuba", "Denmark", "Egypt", "Ethiopia", "Finland", "France", "Germany", "Ghana", "Greece", "Hungary", "Iceland",
    "India", "Indonesia", "Iran", "Iraq", "Ireland", "Israel", "Italy", "Jamaica", "Japan", "Kenya", "Malaysia",
    "Mexico", "Morocco", "Nepal", "New Zealand", "Nigeria", "Norway", "Pakistan", "Peru", "Poland", "Portugal",
    "Romania", "Russia", "Saudi Arabia", "Serbia", "South Korea", "Spain", "Sweden", "Switzerland", "Thailand",
    "Tunisia", "Turkey", "Ukraine", "Uruguay", "Venezuela", "Vietnam", "Zimbabwe",
)  # fmt: skip
OPPOSITES = (
    "hot", "big", "fast", "happy", "up", "left", "day", "black", "old", "rich", "strong", "wet", "open", "early",
    "hard", "long", "high", "light", "full", "clean", "near", "young", "good", "north", "east", "inside", "before",
    "always", "true", "buy", "win", "love", "push", "start", "remember", "arrive", "front", "top", "first", "same",
    "quiet", "thick", "wide", "deep", "sweet", "cheap", "easy", "alive", "male", "husband",
)  # fmt: skip
VERBS = (
    "go", "see", "eat", "take", "give", "run", "write", "speak", "drink", "sing", "swim", "begin", "break", "drive",
    "fly", "know", "grow", "throw", "draw", "wear", "buy", "bring", "think", "teach", "catch", "sleep", "keep",
    "feel", "leave", "build", "send", "spend", "lose", "find", "hold", "stand", "sit", "win", "meet", "read",
    "ride", "rise", "fall", "choose", "forget", "hide", "bite", "blow", "steal", "wake",
)  # fmt: skip
PLURALS = (
    "child", "man", "woman", "foot", "tooth", "mouse", "goose", "person", "leaf", "knife", "wolf", "city", "baby",
    "box", "bus", "dish", "church", "tomato", "potato", "hero", "story", "lady", "party", "key", "day", "photo",
    "piano", "glass", "wife", "life", "half", "shelf", "thief", "ox", "sheep", "fish", "deer", "cactus", "crisis",
    "analysis",
)  # fmt: skip
ELEMENTS = (
    "hydrogen", "helium", "lithium", "carbon", "nitrogen", "oxygen", "fluorine", "neon", "sodium", "magnesium",
    "aluminium", "silicon", "phosphorus", "sulfur", "chlorine", "argon", "potassium", "calcium", "iron", "copper",
    "zinc", "silver", "tin", "iodine", "gold", "mercury", "lead", "uranium", "titanium", "nickel",
)  # fmt: skip
ANIMALS = (
    "dog", "cat", "cow", "horse", "pig", "sheep", "lion", "duck", "hen", "bear", "deer", "frog", "goat", "kangaroo",
    "eagle", "swan", "fox", "wolf", "tiger", "butterfly",
)  # fmt: skip
THINGS = (
    "grass", "snow", "blood", "the sky", "coal", "a lemon", "a banana", "milk", "a carrot", "a strawberry",
    "chocolate", "gold", "a cucumber", "the sun", "an elephant", "a polar bear", "a flamingo", "cheese", "paper",
    "a tomato",
)  # fmt: skip
AUTHORS = (
    "Hamlet", "Romeo and Juliet", "War and Peace", "Don Quixote", "Pride and Prejudice", "Moby-Dick",
    "Oliver Twist", "Great Expectations", "Frankenstein", "Dracula", "The Odyssey", "Faust", "Les Miserables",
    "Jane Eyre", "1984", "The Hobbit", "Harry Potter", "Macbeth", "Crime and Punishment", "The Great Gatsby",
)  # fmt: skip
# a few lines that show the form, and the questions that follow it
FACTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Q: What is the capital of {}?\nA:": ("Bulgaria Sofia|Algeria Algiers|Lebanon Beirut", COUNTRIES),
    "Q: On which continent is {}?\nA:": ("Bulgaria Europe|Algeria Africa|Lebanon Asia", COUNTRIES),
    "Q: Which language is spoken by most people in {}?\nA:": ("Bulgaria Bulgarian|Algeria Arabic|Laos Lao", COUNTRIES),
    "Q: What is the currency of {}?\nA:": ("Bulgaria Lev|Algeria Dinar|Laos Kip", COUNTRIES),
    "Q: What is the opposite of {}?\nA:": ("small large|sad glad|down up", OPPOSITES),
    "Q: What is the past tense of {}?\nA:": ("make made|come came|sell sold", VERBS),
    "Q: What is the plural of {}?\nA:": ("cat cats|loaf loaves|fly flies", PLURALS),
    "Q: What is the chemical symbol of {}?\nA:": ("boron B|cobalt Co|radium Ra", ELEMENTS),
    "Q: What is a young {} called?\nA:": ("seal pup|elephant calf|hare leveret", ANIMALS),
    "Q: Which colour is {}?\nA:": ("ink blue|an orange orange|ash grey", THINGS),
    "Q: Who wrote {}?\nA:": ("Ulysses James Joyce|Emma Jane Austen|Candide Voltaire", AUTHORS),
}
FRENCH = (
    "water eau|bread pain|house maison|dog chien|cat chat|red rouge|green vert|white blanc|black noir|blue bleu|"
    "one un|two deux|three trois|four quatre|five cinq|six six|seven sept|eight huit|nine neuf|ten dix|"
    "mother mère|father père|brother frère|sister soeur|son fils|daughter fille|friend ami|man homme|woman femme|"
    "child enfant|day jour|night nuit|morning matin|evening soir|year année|month mois|week semaine|hour heure|"
    "sun soleil|moon lune|star étoile|sky ciel|sea mer|mountain montagne|river rivière|tree arbre|flower fleur|"
    "bird oiseau|fish poisson|horse cheval|milk lait|wine vin|cheese fromage|meat viande|apple pomme|egg oeuf|"
    "salt sel|sugar sucre|book livre|pen stylo|table table|chair chaise|door porte|window fenêtre|key clé|"
    "car voiture|train train|city ville|street rue|school école|church église|hand main|head tête|eye oeil|"
    "heart coeur|fire feu|earth terre|air air|rain pluie|snow neige|wind vent|hot chaud|cold froid|big grand|"
    "small petit|good bon|bad mauvais|new nouveau|old vieux|young jeune|beautiful beau|happy heureux|sad triste|"
    "yes oui|no non|thank you merci|hello bonjour|goodbye au revoir|please s'il vous plaît|king roi|queen reine|"
    "love amour|peace paix|war guerre|life vie|death mort|money argent|work travail|music musique|language langue"
)
SPANISH = (
    "water agua|bread pan|house casa|dog perro|cat gato|red rojo|green verde|white blanco|black negro|blue azul|"
    "one uno|two dos|three tres|four cuatro|five cinco|six seis|seven siete|eight ocho|nine nueve|ten diez|"
    "mother madre|father padre|brother hermano|sister hermana|son hijo|daughter hija|friend amigo|man hombre|"
    "woman mujer|child niño|day día|night noche|morning mañana|year año|month mes|week semana|hour hora|sun sol|"
    "moon luna|star estrella|sky cielo|sea mar|mountain montaña|river río|tree árbol|flower flor|bird pájaro|"
    "horse caballo|milk leche|wine vino|cheese queso|meat carne|apple manzana|egg huevo|salt sal|sugar azúcar|"
    "book libro|table mesa|chair silla|door puerta|window ventana|key llave|car coche|train tren|city ciudad|"
    "street calle|school escuela|church iglesia|hand mano|head cabeza|eye ojo|heart corazón|fire fuego|earth tierra|"
    "air aire|rain lluvia|snow nieve|wind viento|cold frío|good bueno|bad malo|new nuevo|old viejo|young joven|"
    "happy feliz|sad triste|yes sí|no no|thank you gracias|hello hola|goodbye adiós|king rey|queen reina|love amor|"
    "peace paz|war guerra|life vida|death muerte|money dinero|work trabajo|music música|language idioma"
)
# a one-line function of x (and y): its comment, its name and arguments, and what has to hold
FUNCTIONS = (
    ("the square of x", "square(x)", "square(7) == 49 and square(-3) == 9"),
    ("the cube of x", "cube(x)", "cube(3) == 27"),
    ("half of x", "half(x)", "half(8) == 4"),
    ("twice x", "double(x)", "double(21) == 42"),
    ("three times x", "triple(x)", "triple(7) == 21"),
    ("the sum of x and y", "add(x, y)", "add(2, 5) == 7"),
    ("the difference of x and y", "subtract(x, y)", "subtract(9, 4) == 5"),
    ("the product of x and y", "multiply(x, y)", "multiply(6, 7) == 42"),
    ("x divided by y", "divide(x, y)", "divide(12, 4) == 3"),
    ("the larger of x and y", "larger(x, y)", "larger(3, 8) == 8 and larger(9, 2) == 9"),
    ("the smaller of x and y", "smaller(x, y)", "smaller(3, 8) == 3 and smaller(9, 2) == 2"),
    ("the mean of x and y", "mean(x, y)", "mean(4, 8) == 6"),
    ("if x is even", "is_even(x)", "is_even(4) and not is_even(7)"),
    ("if x is odd", "is_odd(x)", "is_odd(5) and not is_odd(8)"),
    ("if x is positive", "is_positive(x)", "is_positive(2) and not is_positive(-2)"),
    ("if x is negative", "is_negative(x)", "is_negative(-2) and not is_negative(2)"),
    ("if x is zero", "is_zero(x)", "is_zero(0) and not is_zero(1)"),
    ("if x equals y", "is_equal(x, y)", "is_equal(2, 2) and not is_equal(2, 3)"),
    ("if x is greater than y", "is_greater(x, y)", "is_greater(3, 2) and not is_greater(2, 3)"),
    ("if x is less than y", "is_less(x, y)", "is_less(2, 3) and not is_less(3, 2)"),
    ("if x is divisible by y", "is_divisible(x, y)", "is_divisible(9, 3) and not is_divisible(9, 2)"),
    ("the absolute value of x", "absolute(x)", "absolute(-4) == 4"),
    ("x with the opposite sign", "negate(x)", "negate(5) == -5"),
    ("x plus one", "increment(x)", "increment(5) == 6"),
    ("x minus one", "decrement(x)", "decrement(5) == 4"),
    ("x to the power of y", "power(x, y)", "power(2, 5) == 32"),
    ("the remainder of x divided by y", "remainder(x, y)", "remainder(17, 5) == 2"),
    ("the length of the string x", "length(x)", "length('word') == 4"),
    ("the string x in upper case", "upper(x)", "upper('word') == 'WORD'"),
    ("the string x in lower case", "lower(x)", "lower('WORD') == 'word'"),
    ("the string x reversed", "reverse(x)", "reverse('abc') == 'cba'"),
    ("the first character of the string x", "first(x)", "first('word') == 'w'"),
    ("the last character of the string x", "last(x)", "last('word') == 'd'"),
    ("the strings x and y joined", "join(x, y)", "join('ab', 'cd') == 'abcd'"),
    ("if the string x starts with y", "starts(x, y)", "starts('word', 'wo') and not starts('word', 'rd')"),
    ("if the string x ends with y", "ends(x, y)", "ends('word', 'rd') and not ends('word', 'wo')"),
    ("if the string x contains y", "contains(x, y)", "contains('word', 'or') and not contains('word', 'z')"),
    ("the words of the string x", "words(x)", "words('a b c') == ['a', 'b', 'c']"),
    ("the number of words in the string x", "count_words(x)", "count_words('a b c') == 3"),
    ("the sum of the list x", "total(x)", "total([1, 2, 3]) == 6"),
    ("the largest number of the list x", "largest(x)", "largest([1, 5, 3]) == 5"),
    ("the smallest number of the list x", "smallest(x)", "smallest([4, 1, 3]) == 1"),
    ("the mean of the list x", "average(x)", "average([1, 2, 3]) == 2"),
    ("the list x sorted", "in_order(x)", "in_order([3, 1, 2]) == [1, 2, 3]"),
    ("the list x without duplicates", "unique(x)", "sorted(unique([1, 1, 2])) == [1, 2]"),
    ("the first element of the list x", "head(x)", "head([4, 5]) == 4"),
    ("the last element of the list x", "tail(x)", "tail([4, 5]) == 5"),
    ("the squares of the numbers in the list x", "squares(x)", "list(squares([1, 2, 3])) == [1, 4, 9]"),
    ("the even numbers of the list x", "evens(x)", "list(evens([1, 2, 4])) == [2, 4]"),
    ("the positive numbers of the list x", "positives(x)", "list(positives([-1, 2, 0])) == [2]"),
    ("the lists x and y joined", "concatenate(x, y)", "concatenate([1], [2]) == [1, 2]"),
    ("if the list x is empty", "is_empty(x)", "is_empty([]) and not is_empty([1])"),
    ("the integer x as a string", "to_text(x)", "to_text(12) == '12'"),
    ("the string x as an integer", "to_number(x)", "to_number('12') == 12"),
    ("the area of a rectangle with the sides x and y", "area(x, y)", "area(3, 4) == 12"),
    ("the perimeter of a rectangle with the sides x and y", "perimeter(x, y)", "perimeter(3, 4) == 14"),
    ("x kilometres in metres", "to_metres(x)", "to_metres(3) == 3000"),
    ("x hours in minutes", "to_minutes(x)", "to_minutes(2) == 120"),
    ("x minutes in seconds", "to_seconds(x)", "to_seconds(3) == 180"),
    ("x degrees Celsius in Fahrenheit", "to_fahrenheit(x)", "to_fahrenheit(100) == 212"),
)
FUNCTION_FORM = (
    "# Return the quotient of x and y, rounded down\ndef quotient(x, y):\n    return x // y\n\n"
    "# Return the string x without spaces at its ends\ndef strip(x):\n    return x.strip()\n\n"
)


def facts() -> Iterator[Probe]:
    """Yield questions about facts, without an answer."""
    for question, (shown, asked) in FACTS.items():
        examples = "".join(_example(question, *pair.split(" ", 1)) for pair in _pairs(shown))
        for thing in asked:
            yield Probe(examples + question.format(thing), "exact", group="facts")


def _pairs(shown: str) -> list[str]:
    # the first word is the question's, but for an article
    return [pair.replace("an ", "an\xa0", 1) if pair.startswith("an ") else pair for pair in shown.split("|")]


def _example(question: str, thing: str, answer: str) -> str:
    return f"{question.format(thing.replace(chr(160), ' '))} {answer}\n\n"


def sums(choice: random.Random, count: int = 300) -> Iterator[Probe]:
    """Yield sums of two numbers of two digits, and comparisons of such numbers."""
    for _ in range(count):
        first, second = choice.randint(10, 89), choice.randint(10, 89)
        asked = f"12 + 31 = 43\n25 + 48 = 73\n60 + 17 = 77\n{first} + {second} ="
        yield Probe(asked, "number", str(first + second), "sums")
    for _ in range(count // 2):
        first, second = choice.sample(range(10, 100), 2)
        form = "Q: Which is larger, 31 or 12?\nA: 31\n\nQ: Which is larger, 25 or 48?\nA: 48\n\n"
        asked = f"{form}Q: Which is larger, {first} or {second}?\nA:"
        yield Probe(asked, "number", str(max(first, second)), "sums")


def translations() -> Iterator[Probe]:
    """Yield English words to translate into French and Spanish."""
    for language, words, form in (
        ("French", FRENCH, "lake lac|green pepper poivron|uncle oncle"),
        ("Spanish", SPANISH, "lake lago|green pepper pimiento|uncle tío"),
    ):
        examples = "".join(f"English: {word}\n{language}: {other}\n\n" for word, other in map(_split, form.split("|")))
        for word, other in map(_split, words.split("|")):
            yield Probe(f"{examples}English: {word}\n{language}:", "exact", other, "translations")


def _split(pair: str) -> tuple[str, str]:
    """Split a pair of which either side may have two words."""
    known = {"thank you": "thank you ", "green pepper": "green pepper "}
    for start in known.values():
        if pair.startswith(start):
            return start.strip(), pair.removeprefix(start)
    word, other = pair.split(" ", 1)
    return word, other


def functions() -> Iterator[Probe]:
    """Yield functions of one line to complete, and what has to hold then."""
    for comment, signature, test in FUNCTIONS:
        asked = f"{FUNCTION_FORM}# Return {comment}\ndef {signature}:\n    return"
        yield Probe(asked, "python", group="functions", test=f"assert {test}")
