"""Robin's inbox: synthetic emails in SQLite, and the questions that they answer.

In: a seed. Out: a folder with `emails.db`, `train.jsonl` and `test.jsonl`; the same seed writes the same rows.

Every question is about one thing (an invoice, a meeting, a parcel, a train). A later email moves a third of the
meetings, so that the newest one counts. The rest of the inbox is newsletters.
"""

import contextlib
import random
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

from parts.rows import write_rows

NUM_EACH, NUM_NEWSLETTERS, NUM_TEST = 60, 160, 48
OWNER = "robin@harbour.example"
FIRST_DAY = datetime(2026, 1, 5, 8, 0)

PEOPLE = ("Ada", "Bea", "Carla", "Dev", "Elif", "Femi", "Gus", "Hana", "Ines", "Jonas")
TOPICS = ("the budget", "hiring", "the roof", "the new website", "the summer fair", "safety", "the annual report")
COMPANIES = ("Northlight", "Pinegate", "Quillon", "Redwater", "Solbank", "Tarnhill", "Umberly", "Vantor")
SERVICES = ("cleaning", "printing", "hosting", "catering", "insurance", "repairs", "translation", "transport")
ITEMS = ("lamp", "kettle", "keyboard", "backpack", "raincoat", "globe", "toolbox", "chess set")
CITIES = ("Aarhus", "Bergen", "Cork", "Delft", "Espoo", "Faro", "Ghent", "Hamburg")
MONTHS = ("March", "April", "May", "June", "July", "August", "September", "October")

SCHEMA = """
CREATE TABLE emails (id INTEGER PRIMARY KEY, sender TEXT, recipient TEXT, sent TEXT, subject TEXT, body TEXT);
CREATE VIRTUAL TABLE emails_text USING fts5(sender, subject, body, content='emails', content_rowid='id');
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Email:
    """One email; `day` is when it came, in days after the first."""

    day: float
    sender: str
    subject: str
    body: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """The emails about one thing, oldest first, and the question that the last one answers."""

    emails: tuple[Email, ...]
    question: str
    answer: str


def invoices(rng: random.Random) -> Iterator[Thread]:
    """An amount, by company and service."""
    for company, service in rng.sample(list(product(COMPANIES, SERVICES)), NUM_EACH):
        amount = f"{rng.randint(40, 990)}.{rng.choice(('00', '25', '50', '90'))}"
        number = rng.randint(10000, 99999)
        body = f"Dear Robin,\nplease find invoice {number} for {service}: {amount} euros, due in 14 days.\n{company}"
        email = Email(
            day=rng.uniform(0, 200),
            sender=f"billing@{company.lower()}.example",
            subject=f"Invoice {number}",
            body=body,
        )
        yield Thread(
            emails=(email,),
            question=f"How many euros does {company} charge for {service}?",
            answer=amount,
        )


def meetings(rng: random.Random) -> Iterator[Thread]:
    """A room, by person and topic; a third of them is moved to another room later."""
    for number, (person, topic) in enumerate(rng.sample(list(product(PEOPLE, TOPICS)), NUM_EACH)):
        first, second = (str(room) for room in rng.sample(range(101, 400), 2))
        sender, day = f"{person.lower()}@harbour.example", rng.uniform(0, 150)
        time = f"{rng.randint(8, 17)}:{rng.choice(('00', '15', '30', '45'))}"
        emails = [
            Email(
                day=day,
                sender=sender,
                subject=f"Meeting about {topic}",
                body=f"Hi Robin,\nlet us talk about {topic} on Thursday at {time} in room {first}.\n{person}",
            )
        ]
        if moved := number % 3 == 0:
            body = f"Hi Robin,\nroom {first} is taken, so our meeting about {topic} is in room {second}.\n{person}"
            emails.append(Email(day=day + 1, sender=sender, subject=f"Re: Meeting about {topic}", body=body))
        yield Thread(
            emails=tuple(emails),
            question=f"In which room do I meet {person} about {topic}?",
            answer=second if moved else first,
        )


def parcels(rng: random.Random) -> Iterator[Thread]:
    """A tracking number, by shop and item."""
    for company, item in rng.sample(list(product(COMPANIES, ITEMS)), NUM_EACH):
        code = f"{rng.choice('ABCDEFGH')}{rng.randint(100000, 999999)}"
        email = Email(
            day=rng.uniform(0, 200),
            sender=f"orders@{company.lower()}.example",
            subject=f"Your {item} is on its way",
            body=f"Hello Robin,\nthe {item} you ordered has left our house. Tracking number: {code}.\n{company}",
        )
        yield Thread(
            emails=(email,),
            question=f"What is the tracking number of the {item} from {company}?",
            answer=code,
        )


def trains(rng: random.Random) -> Iterator[Thread]:
    """A time of departure, by city and month."""
    for city, month in rng.sample(list(product(CITIES, MONTHS)), NUM_EACH):
        time = f"{rng.randint(5, 22):02d}:{rng.randint(0, 59):02d}"
        body = f"Your ticket to {city}: {month} {rng.randint(1, 28)}, departure {time}, platform {rng.randint(1, 12)}."
        email = Email(
            day=rng.uniform(0, 200),
            sender="tickets@railway.example",
            subject=f"Your journey to {city}",
            body=body,
        )
        yield Thread(emails=(email,), question=f"When does my train to {city} leave in {month}?", answer=time)


def newsletters(rng: random.Random) -> Iterator[Email]:
    """What nobody asks about, with the same names in it."""
    for _ in range(NUM_NEWSLETTERS):
        company, item, city = rng.choice(COMPANIES), rng.choice(ITEMS), rng.choice(CITIES)
        yield Email(
            day=rng.uniform(0, 200),
            sender=f"news@{company.lower()}.example",
            subject=f"{company} news: {rng.choice(SERVICES)} made easy",
            body=f"Win a {item} and a weekend in {city}! {rng.randint(10, 70)}% off until Sunday.",
        )


def write_inbox(folder: Path, seed: int = 0) -> Path:
    """Write the database and the questions (with the id of the email that counts); gives the folder."""
    rng = random.Random(seed)
    threads = [thread for kind in (invoices, meetings, parcels, trains) for thread in kind(rng)]
    emails = [*(email for thread in threads for email in thread.emails), *newsletters(rng)]
    emails.sort(key=lambda email: email.day)
    number = {id(email): position + 1 for position, email in enumerate(emails)}
    folder.mkdir(parents=True, exist_ok=True)
    _write_database(folder / "emails.db", emails)
    rows: list[dict[str, Any]] = [
        {"question": thread.question, "answer": thread.answer, "email_id": number[id(thread.emails[-1])]}
        for thread in threads
    ]
    rng.shuffle(rows)
    return write_rows(folder, {"train": rows[NUM_TEST:], "test": rows[:NUM_TEST]})


def _write_database(path: Path, emails: list[Email]) -> None:
    path.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.executescript(SCHEMA)
        for number, email in enumerate(emails, start=1):
            sent = (FIRST_DAY + timedelta(days=email.day)).isoformat(sep=" ", timespec="minutes")
            row = (number, email.sender, OWNER, sent, email.subject, email.body)
            database.execute("INSERT INTO emails VALUES (?, ?, ?, ?, ?, ?)", row)
        database.execute("INSERT INTO emails_text(emails_text) VALUES ('rebuild')")
