"""The built-in prompts of `plait demo --compare`: invented manuals and tool lists, written by code.

The texts come from the word lists below and a fixed seed. So the package needs no corpus, and the same version writes
the same prompts everywhere. Their sizes are from about 1,000 to about 6,000 tokens, so that small and large prefixes
compete for a fleet's caches.
"""

from __future__ import annotations

import random
from itertools import product
from typing import Any, NamedTuple


class Manual(NamedTuple):
    """A product manual. `text` is the document; it answers the `questions`."""

    title: str
    text: str
    questions: tuple[str, ...]


class Catalogue(NamedTuple):
    """The tools of one service as OpenAI's `tools` array, and `questions` that they can answer."""

    title: str
    tools: tuple[dict[str, Any], ...]
    questions: tuple[str, ...]


_PER_TITLE_QUESTIONS = 16

_DEVICES = (
    "bench kiln", "bread oven", "label printer", "water softener", "wood lathe", "ice machine",
    "seed sorter", "air compressor", "film scanner", "loom", "bottle washer", "grain mill",
)  # fmt: skip
_PLACES = ("upper", "lower", "front", "rear", "inner", "outer", "left", "right")
_PARTS = (
    "drive belt", "inlet valve", "control board", "bearing", "filter", "heating element",
    "door seal", "speed sensor", "drain pump", "guide rail", "fuse holder", "cooling fan",
)  # fmt: skip
_FAULTS = (
    "has stopped reporting", "is warmer than its limit", "moves more slowly than it should",
    "draws too much current", "did not reach its position in time", "has lost its calibration",
)  # fmt: skip
_ADVICE = (
    "Before touching the {part}, switch the machine off and wait {minutes} minutes.",
    "A worn {part} can be recognised by a dull sound at low speed and a faint smell at high speed.",
    "Clean the {part} with a dry cloth; water shortens its life by about {percent} percent.",
    "When the {part} is replaced, check the {other} as well, because the two wear together.",
    "The {part} has been tested at {degrees} degrees and should not be run above that for long.",
    "Keep one spare {part} for every {machines} machines; it is the same for all models of this series.",
    "If the {part} rattles after a service, loosen its screws, turn the shaft once by hand and tighten them again.",
    "The display shows a small wrench while the {part} is being measured, which takes up to {minutes} minutes.",
    "Fit the {part} with the arrow pointing at the {other}; the wrong way round it works, but only at half speed.",
    "After {minutes} minutes without use the {part} is parked, and the first run afterwards begins slowly.",
    "A reading that differs by more than {percent} percent from the table means that the {part} needs adjusting.",
    "Write the date on the {part} when you fit it: the counter in the menu is cleared by a power cut.",
)


def manuals() -> list[Manual]:
    """A dozen manuals, the shortest of about 1,000 tokens and the longest of about 6,000."""
    return [_manual(device, 6 + 31 * step // 11) for step, device in enumerate(_DEVICES)]


def _manual(device: str, n_parts: int) -> Manual:
    rng = random.Random(f"manual of the {device}")  # noqa: S311 - writes text, guards nothing
    title = f"{device.capitalize()}, model {rng.choice('BDKRT')}{rng.randrange(200, 900)}"
    chapters = [f"Operating manual. {title}.\n\nThis manual describes the {n_parts} parts a user can service."]
    questions: list[str] = []
    parts = rng.sample([f"{place} {part}" for place, part in product(_PLACES, _PARTS)], n_parts)
    for number, part in enumerate(parts, start=1):
        other = rng.choice([name for name in parts if name != part])
        text, asked = _chapter(number, part, other, rng)
        chapters.append(text)
        questions += asked
    return Manual(title, "\n\n".join(chapters), tuple(rng.sample(questions, _PER_TITLE_QUESTIONS)))


def _chapter(number: int, part: str, other: str, rng: random.Random) -> tuple[str, list[str]]:
    """The chapter on one part, and the questions that it answers."""
    hours, torque, code = rng.randrange(50, 2000, 10), rng.randrange(2, 40), f"E{number:02d}{rng.randrange(10)}"
    sentences = [
        f"Service the {part} every {hours} operating hours and tighten its screws to {torque} newton metres.",
        f"Fault code {code} means that the {part} {rng.choice(_FAULTS)}; look at the {other} first.",
    ]
    for advice in rng.sample(_ADVICE, 5):
        sentence = advice.format(
            part=part, other=other, minutes=rng.randrange(2, 30), percent=rng.randrange(5, 40),
            degrees=rng.randrange(60, 400, 5), machines=rng.randrange(2, 12),
        )  # fmt: skip
        sentences.append(sentence)
    rng.shuffle(sentences)
    questions = [
        f"How often does the {part} need service?",
        f"To which torque are the screws of the {part} tightened?",
        f"What does fault code {code} mean, and what should I look at first?",
    ]
    return f"{number}. The {part}\n" + " ".join(sentences), questions


_SERVICES: dict[str, tuple[str, ...]] = {
    "warehouse": ("pallet", "shelf", "shipment", "supplier", "stock_count", "return"),
    "library": ("book", "loan", "reader", "branch", "reservation", "fine"),
    "clinic": ("appointment", "patient", "prescription", "room", "invoice", "referral"),
    "railway": ("train", "station", "ticket", "delay", "platform", "seat_plan"),
    "farm": ("field", "crop", "harvest", "machine", "soil_sample", "irrigation_plan"),
    "hotel": ("booking", "guest", "room_type", "rate", "housekeeping_task", "review"),
    "school": ("course", "student", "timetable", "exam", "grade", "classroom"),
    "museum": ("exhibit", "artwork", "visitor_group", "guided_tour", "restoration", "lender"),
    "weather": ("forecast", "alert", "sensor", "observation", "region", "radar_image"),
    "cinema": ("film", "screening", "seat", "voucher", "snack_order", "poster"),
    "harbour": ("vessel", "berth", "container", "customs_form", "tide_table", "crane"),
    "parcel": ("parcel", "courier", "route", "locker", "claim", "delivery_window"),
}
_STATES = ("open", "closed", "waiting", "cancelled", "archived")
_KEYS: dict[str, dict[str, Any]] = {
    "id": {"type": "string", "description": "The record's id, as returned when it was created."},
    "title": {"type": "string", "description": "A short title of at most 80 characters."},
    "words": {"type": "string", "description": "The words to look for, separated by spaces."},
    "format": {"type": "string", "description": "The file format.", "enum": ["csv", "json", "pdf"]},
}
_FILTERS: dict[str, dict[str, Any]] = {
    "state": {"type": "string", "description": "Only records in this state.", "enum": list(_STATES)},
    "changed_after": {"type": "string", "description": "Only records changed after this date, as YYYY-MM-DD."},
    "changed_before": {"type": "string", "description": "Only records changed before this date, as YYYY-MM-DD."},
    "owned_by": {"type": "string", "description": "Only records of the person with this user name."},
    "labels": {"type": "array", "description": "Labels that all must match.", "items": {"type": "string"}},
    "at_most": {"type": "integer", "description": "The most records to look at.", "minimum": 1, "maximum": 5000},
    "order_by": {"type": "string", "description": "The field to sort by.", "enum": ["id", "title", "changed"]},
    "archived_too": {"type": "boolean", "description": "Whether archived records are looked at as well."},
}
_FIELDS: dict[str, dict[str, Any]] = {
    "state": {"type": "string", "description": "The state to put the record in.", "enum": list(_STATES)},
    "notes": {"type": "string", "description": "Free text for colleagues; it is searched but never printed."},
    "owner": {"type": "string", "description": "The user name of the person who is responsible."},
    "due_on": {"type": "string", "description": "The date by which it must be done, as YYYY-MM-DD."},
    "labels": {"type": "array", "description": "The labels to attach.", "items": {"type": "string"}},
    "importance": {"type": "integer", "description": "From 1 for later to 5 for now.", "minimum": 1, "maximum": 5},
}
_HANDLING: dict[str, dict[str, Any]] = {
    "language": {"type": "string", "description": "Language of the answer, two letters.", "examples": ["en"]},
    "with_history": {"type": "boolean", "description": "Whether earlier versions are meant as well."},
    "with_attachments": {"type": "boolean", "description": "Whether attached files are meant as well."},
    "reason": {"type": "string", "description": "Why it is done, for the log, in at most 200 characters."},
}
_ACTIONS: dict[str, tuple[str, str, dict[str, dict[str, Any]]]] = {
    "list": ("Lists the {noun} records of the {service} that pass all the given filters.", "order_by", _FILTERS),
    "get": ("Returns one {noun} record of the {service} with all its fields.", "id", _HANDLING),
    "create": ("Creates a {noun} record in the {service} and returns its id.", "title", _FIELDS),
    "update": ("Changes the given fields of a {noun} record; all others stay as they are.", "id", _FIELDS),
    "delete": ("Removes a {noun} record from the {service}; it can be restored for 30 days.", "id", _HANDLING),
    "search": ("Finds {noun} records whose title or notes contain the given words.", "words", _FILTERS),
    "count": ("Counts the {noun} records of the {service} that pass all the given filters.", "state", _FILTERS),
    "export": ("Writes {noun} records to a file and returns the address to fetch it from.", "format", _FILTERS),
}
"""Each action's description, its one required key, and the keys from which its optional ones are drawn."""

_REQUESTS = (
    "Which {noun} records are {state} and were changed in the last {n} days?",
    "Count the {noun} records that are {state}, and export them if there are more than {n}.",
    "Create a {noun} record titled 'Checked item {n}' and show me what was stored.",
    "Find the {noun} record that mentions number {n} and mark it as {state}.",
    "Show me the first {n} {noun} records, sorted by title.",
)


def catalogues() -> list[Catalogue]:
    """A dozen tool lists, the shortest of about 1,000 tokens and the longest of about 6,000 as JSON."""
    return [_catalogue(service, 5 + 26 * step // 11) for step, service in enumerate(_SERVICES)]


def _catalogue(service: str, n_tools: int) -> Catalogue:
    rng = random.Random(f"tools of the {service}")  # noqa: S311 - writes text, guards nothing
    pairs = sorted(rng.sample(list(product(_SERVICES[service], _ACTIONS)), n_tools))
    tools = tuple(_tool(service, noun, action, rng) for noun, action in pairs)
    asked = [
        template.format(noun=noun.replace("_", " "), state=rng.choice(_STATES), n=rng.randrange(2, 60))
        for noun, template in product(dict.fromkeys(noun for noun, _ in pairs), _REQUESTS)
    ]
    return Catalogue(f"{service} service", tools, tuple(rng.sample(asked, min(_PER_TITLE_QUESTIONS, len(asked)))))


def _tool(service: str, noun: str, action: str, rng: random.Random) -> dict[str, Any]:
    """One function of a service: the key that its action requires, and a few optional ones."""
    description, required, pool = _ACTIONS[action]
    keys = [required, *(key for key in rng.sample(sorted(pool), 4) if key != required)]
    function = {
        "name": f"{service}_{action}_{noun}",
        "description": description.format(noun=noun.replace("_", " "), service=service),
        "parameters": {
            "type": "object",
            "properties": {key: pool[key] if key in pool else _KEYS[key] for key in keys},
            "required": [required],
        },
    }
    return {"type": "function", "function": function}
