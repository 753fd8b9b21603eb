"""More ways to ask for a tool than the built-in teacher's templates: an opening, a verb, what is meant, and the value.

None of them contains a template of the calibration or gate split; those stay unseen (tests/calibration_data/test_splits.py).
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from annie_quant.data.tool_exchanges import grammar_of

OPENINGS = (
    *("", "", "", "please ", "can you ", "could you ", "would you ", "will you ", "I want you to ", "I need you to "),
    *("I would like you to ", "you should ", "now ", "just ", "go and ", "it is time to ", "try to ", "quickly ", "so "),
    *("well, ", "if you can, ", "do me a favour and ", "I ask you to ", "you can ", "why not ", "let us ", "we have to "),
)
CLOSINGS = ("", "", "", "", ", please", " now", " for me", ", thanks", " right away", " if you can", " today", ", okay")
WANTS = ("I want", "I need", "I would like", "I prefer", "I wish for", "we want", "we need", "give me", "get me", "may I have", "how about")
SHOULD = ("should be", "must be", "has to be", "needs to be", "ought to be", "shall be", "had better be", "can be", "is to be", "should go", "must go", "is", "stays", "gets")
SET = ("set", "change", "put", "bring", "move", "turn", "adjust", "get", "switch", "fix", "keep", "leave", "hold", "make", "have", "take", "push")
ROOM_PART = ("the {room} X", "the X in the {room}", "the X of the {room}", "my {room} X", "the X that is in the {room}")


def parts(*names: str) -> tuple[str, ...]:
    return tuple(p.replace("X", n) for p in ROOM_PART for n in names)


# What a tool changes, and to what. {O} and {V} in the frames below.
SETTERS = {
    "set_light": (parts("light", "lamp", "lights"), ("to {brightness} percent", "to {brightness}", "at {brightness} percent", "at {brightness}", "on {brightness} percent")),
    "set_color": (parts("light", "lamp"), ("{color}", "to {color}", "in {color}", "to {color} light")),
    "set_heat": ((*parts("heating", "heater"), "the {room}"), ("to {degrees} degrees", "to {degrees}", "at {degrees} degrees", "at {degrees}", "on {degrees} degrees")),
    "set_blind": (parts("blind", "blinds"), ("{position}", "to {position}", "on {position}")),
    "set_lock": (("the {door} door", "the lock of the {door} door", "the door at the {door}", "the {door} lock"), ("{state}", "to {state}", "on {state}")),
    "set_volume": (parts("volume", "speaker", "sound"), ("to {level}", "at {level}", "to {level} percent", "at {level} percent", "on {level}")),
}
FRAMES = (
    *(f"{v} {{O}} {{V}}" for v in SET),
    *(f"{{O}} {s} {{V}}" for s in SHOULD),
    *(f"{w} {{O}} {{V}}" for w in WANTS),
    *("let {O} be {V}", "can {O} be {V}", "could {O} be {V}", "may {O} be {V}", "{O}: {V}", "{O} {V}", "{V} for {O}"),
    *("{O} {V} would be nice", "is {O} {V}? If not, do it", "see that {O} is {V}", "make sure {O} is {V}"),
)
ASKS = {
    "play_music": (
        *(f"{v} {{title}} in the {{room}}" for v in ("play", "start", "put on", "turn up", "stream", "run", "begin", "let me hear", "we want", "how about", "I like")),
        *("put {title} on in the {room}", "the {room} speaker should play {title}", "in the {room}, play {title}", "{title} in the {room}"),
        *("let {title} sound in the {room}", "make the {room} speaker play {title}", "send {title} to the {room}", "music in the {room}: {title}"),
        *("I feel like {title} in the {room}", "may we hear {title} in the {room}", "fill the {room} with {title}"),
    ),
    "add_item": (
        *(f"{v} {{item}} {w} {{list}} list" for v in ("add", "put", "write", "note", "save", "enter", "keep", "get", "have", "bring", "remember") for w in ("to the", "on the", "on my", "in the", "to my")),
        *("{item} goes on the {list} list", "{item} must be on the {list} list", "the {list} list needs {item}", "we need {item} on the {list} list"),
        *("I forgot {item}, it is for the {list} list", "{list} list: {item}", "one more for the {list} list: {item}", "never forget {item} for the {list} list"),
    ),
    "set_timer": (
        *(f"{v} a timer of {{minutes}} minutes {w} {{label}}" for v in ("set", "make", "begin", "have", "give me", "I want", "create", "open") for w in ("for", "called", "named", "to")),
        *("a {minutes} minute timer for {label}", "timer: {minutes} minutes, {label}", "count down {minutes} minutes for {label}", "tell me when {minutes} minutes of {label} are over"),
        *("{label} takes {minutes} minutes, time it", "time {label} for {minutes} minutes", "in {minutes} minutes tell me about {label}", "{minutes} minutes for {label}"),
        *("let me know of {label} after {minutes} minutes", "remember {label} in {minutes} minutes", "ring in {minutes} minutes for {label}"),
    ),
    "set_alarm": (
        *(f"{v} an alarm {w}" for v in ("set", "make", "put", "I want", "have", "create", "we need", "add") for w in ("at {time} for {label}", "for {label} at {time}", "called {label} at {time}", "at {time}, name it {label}")),
        *("wake us at {time} for {label}", "alarm: {time}, {label}", "an alarm at {time}, it is for {label}", "{label} is at {time}, wake me", "I must get up at {time} for {label}"),
        *("at {time} there is {label}, ring then", "ring me at {time} for {label}", "the alarm for {label} should be at {time}", "the {label} alarm is at {time}"),
    ),
    "clean_floor": (
        *(f"{v} the {{room}} {w}" for v in ("clean", "do", "sweep", "wash", "tidy", "let the robot do", "have the robot clean") for w in ("in {mode} mode", "floor in {mode} mode", "with the {mode} mode", "floor, {mode} mode")),
        *("a {mode} clean for the {room}", "I want the {room} cleaned in {mode} mode", "the {room} is dirty, use {mode} mode", "{mode} clean, {room}", "the {room} floor wants a {mode} clean"),
        *("the robot must clean the {room}, {mode} mode", "start the robot in the {room}, {mode} mode", "make a {mode} clean of the {room}", "the robot goes to the {room} for a {mode} clean"),
    ),
    "read_sensor": (
        *(f"{v} the {{kind}} {w} the {{room}}" for v in ("read", "tell me", "show me", "measure", "what is", "what about", "I need", "I wonder about", "find", "see", "how high is", "get me", "say") for w in ("in", "of", "for")),
        *("{kind} in the {room}", "the {kind} of the {room}", "what {kind} is it in the {room}", "what {kind} has the {room}", "how much {kind} is in the {room}", "the {room}: what is the {kind}"),
        *("is the {kind} in the {room} fine", "I want the {room} {kind}", "what does the {room} {kind} sensor say", "tell me which {kind} the {room} has now"),
    ),
    "find_order": (
        *(f"{v} order {{order}}" for v in ("find", "look up", "where is", "track", "follow", "see", "show me", "open", "search", "what about", "tell me about", "how is", "when comes", "I ask about")),
        *("I wait for my order {order}", "did you send {order}", "was {order} sent", "what is the state of order {order}", "how far is {order}", "my number is {order}, what is new"),
        *("order number {order}, where is it", "I want to know about {order}", "is there news about {order}", "what became of {order}", "has anything happened with {order}"),
    ),
    "find_account": (
        *(f"{v} account {w} {{email}}" for v in ("find the", "look up the", "show me the", "get the", "what is the", "is there any", "bring up the", "check the", "see the") for w in ("of", "for", "with", "under")),
        *("my email is {email}", "I am registered as {email}", "it is {email}, find me", "you know me as {email}", "{email} is my email, look me up", "what do you have under {email}"),
        *("this is {email}, what is my plan", "which plan has {email}", "I forgot my plan, I am {email}", "who is {email}"),
    ),
    "check_stock": (
        *(f"{v} {{product}}" for v in ("do you have", "is there", "do you sell", "can I have", "can I order", "how many are left of", "look for", "I want to buy", "I need", "have you any", "is there still")),
        *("is {product} in stock", "is {product} sold out", "are there any {product}", "how much {product} is left", "would {product} be there", "tell me if {product} is there"),
        *("when do you have {product}", "when will there be {product}", "do you still have {product} in stock", "see whether you have {product}", "{product}: is it in stock", "any {product} there"),
    ),
    "open_ticket": (
        *(f"{v} a {{priority}} ticket {w} {{subject}}" for v in ("open", "make", "write", "start", "create", "I want", "file", "please note", "put in", "give me") for w in ("about", "for", "because of", "on the subject of")),
        *("{subject} is broken, priority {priority}", "there is a {priority} problem with {subject}", "a ticket about {subject}, {priority}", "my problem is {subject}, it is {priority}"),
        *("ticket: {subject}, priority {priority}", "note {subject} with {priority} priority", "open a ticket on {subject}, it has {priority} priority", "complain about {subject}, {priority} priority"),
    ),
}
# Verbs of requests that no tool of the two personas fills.
CANNOT = tuple(
    (
        "summarise|email|fax|scan|read aloud|knit|iron|sell|invest in|draw|sing about|race|hug|explain the theory of|compose a song about|prove|vote for|"
        "guess the age of|fold|plant|swim to|fly to|walk to|babysit|marry|call a taxi to|find a lawyer near|find a hotel near|find a baker near|copy the letter|"
        "save the photo|type the page|help me learn|study|show me how to dance|train me in|write a poem for|write a story on|write a book about|spell|photograph|"
        "film|feed the cat at|feed the fish at|mow the grass at|paint the fence at|fix the bike of|repair the car of|take me to|ride to|book a flight to|"
        "book a room at|buy shares of|send flowers to|send a card to|phone|text|ask|greet|visit|meet|thank|advise|teach my son|teach us|quiz me on|grade|cook|"
        "bake|grill|taste|smell|fetch|carry|throw|kick|lift|build|design|invent|discover|publish the file|print the page|print|copy|delete the file|rename the file|"
        "say something in French about|put into German|interpret|explain|describe|review|predict|bet on|pray for|dream of|imagine|worry about"
    ).split("|")
)
JOINERS = (
    *(" And then: ", " After that: ", " And: ", " Then: ", " And also ", " Plus: ", " Besides, ", " Also ", " And after it: "),
    *(" Oh, and ", " Furthermore: ", " Second: ", " Additionally: ", " Another thing: ", " One more: ", " And another: "),
)


# First words of requests that are no commands, so that no opening fits before them.
SUBJECTS = frozenset(
    "is are do did was has how what when where which who i we my the a an there this it would can could may in at any one you order never music".split()
) | {w for w in ("{title}", "{item}", "{label}", "{kind}", "{mode}", "{order}", "{email}", "{product}", "{subject}", "{minutes}", "{list}", "{product}:", "timer:", "alarm:", "ticket:")}


def core(template: str) -> str:
    return template.lower().rstrip(".?! ")


@cache
def held_out(persona: str) -> tuple[str, ...]:
    grammar = grammar_of(persona)
    assert grammar is not None
    asks = [t for p in grammar.tools.values() for s in ("calibration", "gate") for t in p.ask[s]]
    return tuple(core(t) for t in (*asks, *grammar.abstain["calibration"], *grammar.abstain["gate"]))


def finished(text: str) -> str:
    question = text.lower().startswith(("can ", "could ", "would ", "will ", "is ", "are ", "do ", "did ", "was ", "has ", "have you", "what", "where", "when", "who", "which", "how", "may ", "why "))
    text = text if text.endswith(("?", ".")) else text + ("?" if question else ".")
    return text[:1].upper() + text[1:]


def ask(rng: random.Random, persona: str, tool: str, arguments: dict[str, Any]) -> str | None:
    """Return a request for a call, or None for a tool that has no frames here."""
    while True:
        if tool in SETTERS:
            things, values = SETTERS[tool]
            text = rng.choice(FRAMES).replace("{O}", rng.choice(things)).replace("{V}", rng.choice(values))
        elif tool in ASKS:
            text = rng.choice(ASKS[tool])
        else:
            return None
        first = text.split(" ")[0].lower()
        if first in SET or (tool in ASKS and first not in SUBJECTS):
            text = rng.choice(OPENINGS) + text
        text += rng.choice(CLOSINGS)
        if not any(h in core(text) for h in held_out(persona)):
            break
    if text.startswith("{"):  # so that the argument keeps its small letter
        text = rng.choice(("for ", "now ", "so ", "and ", "okay, ", "next: ")) + text
    return finished(text.format(**arguments))


def cannot(rng: random.Random, persona: str, topic: str) -> str:
    """Return a request that no tool of the persona fills."""
    while True:
        text = rng.choice(OPENINGS) + rng.choice(CANNOT) + " {topic}" + rng.choice(CLOSINGS)
        if not any(h in core(text) for h in held_out(persona)):
            return finished(text.format(topic=topic))
