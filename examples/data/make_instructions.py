"""Writes alpaca.jsonl, sharegpt.jsonl and tokenizer.json: small, correct instruction data and a vocabulary for it.

All of it is made here and free to use (CC0).

    python examples/data/make_instructions.py

The answers are computed or looked up, so they are right. The same seed gives the same rows.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
Pair = tuple[str, str, str]


def _words(text: str) -> list[str]:
    return text.split()


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split(":") for pair in text.split())


CAPITALS = _pairs(
    "Austria:Vienna Belgium:Brussels Brazil:Brasilia Canada:Ottawa Chile:Santiago Cuba:Havana Egypt:Cairo "
    "Finland:Helsinki France:Paris Germany:Berlin Ghana:Accra Greece:Athens Hungary:Budapest Iceland:Reykjavik "
    "Iran:Tehran Ireland:Dublin Italy:Rome Japan:Tokyo Kenya:Nairobi Latvia:Riga Mali:Bamako Nepal:Kathmandu "
    "Norway:Oslo Oman:Muscat Peru:Lima Poland:Warsaw Portugal:Lisbon Qatar:Doha Romania:Bucharest Senegal:Dakar "
    "Spain:Madrid Sweden:Stockholm Thailand:Bangkok Tunisia:Tunis Ukraine:Kyiv Vietnam:Hanoi"
)
OPPOSITES = _pairs(
    "hot:cold big:small early:late full:empty hard:soft happy:sad light:dark long:short loud:quiet new:old "
    "open:closed rich:poor safe:dangerous sharp:blunt strong:weak thick:thin true:false warm:cool wet:dry "
    "wide:narrow young:old"
)
PAST = _pairs(
    "walk:walked go:went see:saw write:wrote eat:ate run:ran buy:bought sing:sang draw:drew bring:brought "
    "find:found make:made open:opened paint:painted read:read carry:carried"
)
THINGS = _words(
    "apples books boats cups doors eggs flags hats keys lamps maps nails pears rings ropes seeds shoes"
)
NAMES = _words("Ada Ben Cora Dan Eva Finn Gita Hugo Ines Jon Kim Leo Mara Nils Olga Paul Rosa Sam Tara Uma")


def arithmetic(draw: random.Random) -> Pair:
    """A sum, difference or product."""
    a, b = draw.randint(2, 99), draw.randint(2, 99)
    sign, result = draw.choice([("+", a + b), ("-", a - b), ("*", a * b)])
    return "Calculate.", f"{a} {sign} {b}", str(result)


def story(draw: random.Random) -> Pair:
    """A sum told as a story, with its way."""
    name, other = draw.sample(NAMES, 2)
    thing, a, b = draw.choice(THINGS), draw.randint(5, 40), draw.randint(2, 5)
    question = (
        f"{name} has {a} {thing} and gives {b} of them to {other}. How many {thing} does {name} have now?"
    )
    return question, "", f"{a} - {b} = {a - b}, so {name} has {a - b} {thing}."


def capital(draw: random.Random) -> Pair:
    """The capital of a country, or the country of a capital."""
    country, city = draw.choice(sorted(CAPITALS.items()))
    if draw.random() < 0.5:
        return f"What is the capital of {country}?", "", f"The capital of {country} is {city}."
    return f"Of which country is {city} the capital?", "", f"{city} is the capital of {country}."


def opposite(draw: random.Random) -> Pair:
    """An antonym."""
    word, other = draw.choice(sorted(OPPOSITES.items()))
    return "Give the opposite of the word.", word, other


def past(draw: random.Random) -> Pair:
    """A sentence put into the past."""
    name, (verb, form) = draw.choice(NAMES), draw.choice(sorted(PAST.items()))
    return "Put the sentence into the past.", f"I {verb} with {name}.", f"I {form} with {name}."


def ordered(draw: random.Random) -> Pair:
    """Words or numbers in order."""
    if draw.random() < 0.5:
        words = draw.sample(THINGS, 4)
        return "Sort the words.", ", ".join(words), ", ".join(sorted(words))
    numbers = draw.sample(range(100), 5)
    return "Sort the numbers.", " ".join(map(str, numbers)), " ".join(map(str, sorted(numbers)))


def conversion(draw: random.Random) -> Pair:
    """A length, weight or time in a smaller unit."""
    large, small, factor = draw.choice(
        [
            ("kilometres", "metres", 1000),
            ("hours", "minutes", 60),
            ("kilograms", "grams", 1000),
            ("weeks", "days", 7),
        ]
    )
    amount = draw.randint(2, 30)
    return f"How many {small} are {amount} {large}?", "", f"{amount} {large} are {amount * factor} {small}."


def as_json(draw: random.Random) -> Pair:
    """Facts of a sentence as JSON."""
    name, thing, count = draw.choice(NAMES), draw.choice(THINGS), draw.randint(2, 60)
    answer = json.dumps({"who": name, "what": thing, "how many": count})
    return "Write the facts as JSON with who, what and how many.", f"{name} bought {count} {thing}.", answer


def rewriting(draw: random.Random) -> Pair:
    """A word upper case, backwards or counted."""
    word = draw.choice(THINGS)
    return draw.choice(
        [
            ("Write the word in capital letters.", word, word.upper()),
            ("Write the word backwards.", word, word[::-1]),
            ("How many letters has the word?", word, str(len(word))),
        ]
    )


TASKS: list[Callable[[random.Random], Pair]] = [
    *(arithmetic, story, capital, opposite, past),
    *(ordered, conversion, as_json, rewriting),
]


def distinct(count: int, draw: random.Random) -> list[Pair]:
    """`count` different tasks, of all kinds in turn."""
    made: dict[Pair, None] = {}
    turn = 0
    while len(made) < count:
        made.setdefault(TASKS[turn % len(TASKS)](draw))
        turn += 1
    return list(made)


def conversation(tasks: list[Pair], draw: random.Random) -> dict[str, list[dict[str, str]]]:
    """Several tasks as one chat, sometimes with a system turn."""
    turns = [{"from": "system", "value": "Answer briefly and correctly."}] if draw.random() < 0.5 else []
    for instruction, given, answer in tasks:
        turns.append({"from": "human", "value": f"{instruction} {given}".strip()})
        turns.append({"from": "gpt", "value": answer})
    return {"conversations": turns}


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """One row a line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def train_tokenizer(texts: list[str]) -> None:
    """A byte-level BPE of 1,024 tokens, as most models have, but for this data; a turn ends with <|im_end|>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    words = Regex(
        r" ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+|\n+|\s"
    )  # each digit is a token, so that sums can be learnt
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(HERE / "tokenizer.json"))


def main() -> None:
    """Write the three files."""
    draw = random.Random(1)
    rows = distinct(900, draw)
    write(
        HERE / "alpaca.jsonl", [dict(zip(("instruction", "input", "output"), p, strict=True)) for p in rows]
    )
    tasks = distinct(900, draw)
    roles = ["### User:\n", "### Assistant:\n", "system\n", "user\n", "assistant\n", "\n\n"] * 100
    train_tokenizer([*roles, *(text for task in [*rows, *tasks] for text in task)])
    draw.shuffle(tasks)
    chats: list[dict[str, object]] = []
    while tasks:
        count = draw.randint(1, 4)
        chats.append(dict(conversation(tasks[:count], draw)))
        tasks = tasks[count:]
    write(HERE / "sharegpt.jsonl", chats)


if __name__ == "__main__":
    main()
