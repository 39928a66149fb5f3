"""Makes sample_prompts.parquet from the texts in sample_texts/: same seed, same table.

    python data/make_sample_prompts.py [OUTPUT]

Six classes of prompts whose answers differ in how much of the prompt they repeat, and eight rows that no run can
answer. README.md beside this file says what each of them is.
"""

from __future__ import annotations

import random
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).parent
OUTPUT = HERE / "sample_prompts.parquet"
SEED = 20240229
ROWS_PER_CLASS = 42

SCHEMA = pa.schema(
    [
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("request_class", pa.string(), nullable=False),
        pa.field("topic", pa.string()),
        pa.field("prompt", pa.string()),
        pa.field("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        pa.field("max_new_tokens", pa.int32()),
        pa.field("min_new_tokens", pa.int32()),
        pa.field("stop", pa.list_(pa.string())),
    ]
)

Row = dict[str, Any]


def chat(*turns: str, system: str | None = None) -> list[dict[str, str | None]]:
    """Messages in which user and assistant take turns, the user first."""
    messages: list[dict[str, str | None]] = [{"role": "system", "content": system}] if system else []
    for index, content in enumerate(turns):
        messages.append({"role": "assistant" if index % 2 else "user", "content": content})
    return messages


def read_texts(name: str) -> dict[str, Any]:
    return tomllib.loads((HERE / "sample_texts" / f"{name}.toml").read_text(encoding="utf-8"))


def extraction_rows(rng: random.Random) -> list[Row]:
    """A business document, and the fields to return as JSON: most of the answer stands in the prompt."""
    words = read_texts("words")
    rows = []
    for index in range(ROWS_PER_CLASS):
        frame = words["extraction"][index % len(words["extraction"])]
        document = fill_document(frame["document"], words["names"], rng)
        example = "{" + ", ".join(f'"{field}": ...' for field in frame["fields"]) + "}"
        task = f"Extract the fields from the document below. Answer with one JSON object of this form:\n{example}"
        system = "You turn documents into JSON. You answer with the JSON object only." if index % 3 == 0 else None
        rows.append({"topic": frame["kind"], "messages": chat(f"{task}\n\n{document}", system=system)})
    return rows


def fill_document(frame: str, names: dict[str, list[str]], rng: random.Random) -> str:
    """One document: the frame with names, dates and amounts drawn for it."""
    first, other = rng.sample(names["first"], 2)
    last = rng.choice(names["last"])
    firm = rng.choice(names["firms"])
    host = "".join(character for character in firm.lower() if character.isalpha())
    month = rng.randrange(10)
    hour = rng.randint(8, 18)
    number = rng.randint(10_000, 99_999)
    items, total = draw_items(names["goods"], rng)
    return frame.format(
        who=f"{first} {last}",
        other=f"{other} {rng.choice(names['last'])}",
        email=f"{first.lower()}.{last.lower()}@{host}.example",
        firm=firm,
        number=number,
        street=rng.choice(names["streets"]),
        house=rng.randint(1, 120),
        town=rng.choice(names["towns"]),
        date=f"{rng.randint(1, 28)} {names['months'][month]} 2025",
        later_date=f"{rng.randint(1, 28)} {names['months'][month + 1]} 2025",
        hour=hour,
        next_hour=hour + 1,
        hours=rng.randint(20, 40),
        days=rng.randint(12, 30),
        small=rng.randint(3, 11),
        goods=rng.choice(names["goods"]),
        job=rng.choice(names["jobs"]),
        event=rng.choice(names["events"]),
        device=rng.choice(names["devices"]),
        fault=rng.choice(names["faults"]).format(number=number % 30 + 2),
        urgency=rng.choice(["urgent, because we have no second one", "not urgent", "urgent: the shop is full"]),
        items=items,
        total=total,
    )


def draw_items(goods: list[str], rng: random.Random) -> tuple[str, str]:
    """Two to ten lines of goods with their prices, and the sum of the prices."""
    lines, cents = [], 0
    for position, name in enumerate(rng.sample(goods, rng.randint(2, 10)), start=1):
        quantity, unit_cents = rng.randint(1, 40), rng.randint(150, 9_900)
        cents += quantity * unit_cents
        lines.append(f"{position}. {quantity} x {name} at {unit_cents / 100:.2f} = {quantity * unit_cents / 100:.2f}")
    return "\n".join(lines), f"{cents / 100:.2f}"


def rewriting_rows(rng: random.Random) -> list[Row]:
    """A text to return with small changes."""
    texts, swaps = read_texts("passages")["rewrite"].values()
    requests = []
    for text, (old, new) in zip(texts, swaps, strict=True):
        requests.append((f"Rewrite the text below. Replace '{old}' by '{new}' and change nothing else.", text))
        requests.append(("Correct the spelling mistakes in the text below.", misspell(text, rng)))
        requests.append(("Repeat the text below with each sentence on a line of its own and numbered.", text))
    for left, right in zip(texts[::2], texts[1::2], strict=True):
        requests.append(("Join the two texts below into one. Keep every sentence as it is.", f"{left}\n\n{right}"))
    rows = []
    for index, (task, text) in enumerate(requests):
        turns = (task, "Of course. Please send me the text.", text) if index % 5 == 0 else (f"{task}\n\n{text}",)
        rows.append({"topic": task.split()[0].lower(), "messages": chat(*turns)})
    return rows


def misspell(text: str, rng: random.Random) -> str:
    """Swap two inner letters in about a third of the longer words."""
    words = text.split(" ")
    for index, word in enumerate(words):
        if len(word) > 4 and word[1:4].isalpha() and rng.random() < 0.3:
            words[index] = word[0] + word[2] + word[1] + word[3:]
    return " ".join(words)


def code_edit_rows(rng: random.Random) -> list[Row]:
    """A small program and one change to make in it."""
    rows = []
    for program in read_texts("code")["program"]:
        for edit in program["edits"]:
            code = program["code"].strip("\n")
            task = f"Edit this {program['language']}. {edit} Return the whole code.\n\n```\n{code}\n```"
            rows.append({"topic": program["language"], "messages": chat(task)})
    return rows


def passage_qa_rows(rng: random.Random) -> list[Row]:
    """A question about a given passage: of one paragraph, of a whole article, or of four articles and two notices."""
    texts = read_texts("passages")
    passages, notices = texts["passage"], texts["rewrite"]["texts"]
    rows = []
    for index, passage in enumerate(passages):
        article = "\n\n".join([passage["title"], *passage["paragraphs"]])
        first, second, third, fourth = passage["questions"]
        for question in (first, second):
            task = "Read the article and answer the question in one or two sentences."
            rows.append({"topic": passage["title"], "messages": chat(f"{task}\n\n{article}\n\nQuestion: {question}")})
        paragraph = rng.choice(passage["paragraphs"])
        summary = f"Passage: {paragraph}\n\nQuestion: What is this passage about?\nAnswer: The passage is about"
        rows.append({"topic": passage["title"], "prompt": summary, "stop": ["\nQuestion:", "\nPassage:"]})
        if index % 2 == 0:
            others = rng.sample(passages[:index] + passages[index + 1 :], 3)
            paper = [article, *("\n\n".join([other["title"], *other["paragraphs"]]) for other in others)]
            paper += rng.sample(notices, 2)
            rng.shuffle(paper)
            task = "\n\n---\n\n".join(paper) + f"\n\n---\n\nAnswer from the articles above. {third} {fourth}"
            rows.append({"topic": passage["title"], "messages": chat(task)})
    return rows


def short_facts_rows(rng: random.Random) -> list[Row]:
    """A question that a few words answer, or a sentence to complete."""
    facts = read_texts("words")["facts"]
    openings = [
        {"topic": "completion", "prompt": f"Complete this sentence truthfully: {text}", "max_new_tokens": 16}
        for text in facts["openings"]
    ]
    system = "You answer in one short sentence."
    questions = [{"topic": "question", "messages": chat(text, system=system)} for text in facts["questions"]]
    return openings + questions


def open_writing_rows(rng: random.Random) -> list[Row]:
    """Something new to write: little of the answer stands in the prompt."""
    writing = read_texts("words")["writing"]
    tasks = list(writing["opinions"])
    while len(tasks) < ROWS_PER_CLASS:
        form, subject, mood = (rng.choice(writing[part]) for part in ("forms", "subjects", "moods"))
        extra = f" {rng.choice(writing['extras'])}" if rng.random() < 0.5 else ""
        task = f"Write {form} about {subject}. The tone is {mood}.{extra}"
        if task not in tasks:
            tasks.append(task)
    return [
        {"topic": "opinion" if index < len(writing["opinions"]) else "fiction", "messages": chat(task)}
        | ({"min_new_tokens": 8} if index % 6 == 0 else {})
        for index, task in enumerate(tasks)
    ]


def bad_rows() -> list[Row]:
    """Rows that must become error rows, each for another reason."""
    good_chat = chat("What is the capital of Portugal?")
    paragraphs = [text for passage in read_texts("passages")["passage"] for text in passage["paragraphs"]]
    rows: list[Row] = [
        {"topic": "no prompt at all"},
        {"topic": "prompt of white space only", "prompt": " \n\t "},
        {"topic": "empty list of messages", "messages": []},
        {"topic": "message without content", "messages": [{"role": "user", "content": None}]},
        {"topic": "message without role", "messages": [{"role": None, "content": "Good morning."}]},
        {"topic": "budget of no token", "messages": good_chat, "max_new_tokens": 0},
        {"topic": "empty stop string", "messages": good_chat, "stop": [""]},
        {"topic": "longer than the model's context", "prompt": "\n\n".join(paragraphs * 3)},
    ]
    return [{"request_id": f"bad-{number}", "request_class": "short_facts"} | row for number, row in enumerate(rows, 1)]


CLASSES: dict[str, Callable[[random.Random], list[Row]]] = {
    "extraction": extraction_rows,
    "rewriting": rewriting_rows,
    "code_edit": code_edit_rows,
    "passage_qa": passage_qa_rows,
    "short_facts": short_facts_rows,
    "open_writing": open_writing_rows,
}


def make_table(seed: int = SEED) -> pa.Table:
    """The whole table, classes and bad rows mixed."""
    rng = random.Random(seed)
    rows = bad_rows()
    for name, make_rows in CLASSES.items():
        for number, row in enumerate(make_rows(rng), start=1):
            rows.append({"request_id": f"{name}-{number:02}", "request_class": name} | row)
    rng.shuffle(rows)
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def main(arguments: list[str]) -> None:
    output = Path(arguments[0]) if arguments else OUTPUT
    table = make_table()
    pq.write_table(table, output, compression="zstd", row_group_size=100)
    print(f"{output}: {table.num_rows} rows")


if __name__ == "__main__":
    main(sys.argv[1:])
