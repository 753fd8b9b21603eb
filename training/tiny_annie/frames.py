"""More ways to ask for a tool than the built-in teacher's templates: an opening, a verb, what is meant, and the value.

None of them contains a template of the calibration or gate split; those stay unseen (tests/calibration_data/test_splits.py).
"""

from __future__ import annotations

import random
import re
from functools import cache
from typing import Any

from annie_quant.data.exchanges import Exchange
from annie_quant.data.phrases import PHRASES
from annie_quant.data.tool_exchanges import grammar_of
from annie_quant.data.words import WORDS

SUM = re.compile(r"(\d+) (times|plus|minus) (\d+) is \d+\.")

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
ASKS |= {
    "search_memory": (
        *(f"{v} my {{query}}{w}" for v in ("what was said about", "what do you know about", "remind me of what I said about", "tell me what I told you about", "what did you learn about", "what have I told you about", "what did we speak of, was it", "look in your memory for", "search your memory for", "what did I mention about", "do you remember me talking about", "did I mention", "did I ever say anything about", "did we speak about", "what were we saying about", "bring back what I said of", "think back to", "do you still remember", "have we spoken about") for w in ("", "", " on {day}", " last {day}", " this {day}", " yesterday", " that {day}")),
        *("my {query}, what did I say", "my {query}, do you remember it", "when did we last talk about my {query}", "how was it with my {query}", "I told you about my {query}, what was it"),
        *("on {day} I told you about my {query}, what was it", "last {day} we talked about my {query}, remind me", "I forgot what I said about my {query} on {day}", "remind me on my {query} of {day}"),
    ),
    "web_search": (
        *(f"{v} the {{query}}{w}" for v in ("look for", "search online for", "what do the papers say about", "what is going on with", "what happens with", "tell me the latest on", "get me the newest news about", "give me today's news of", "see what is new with", "use the web to find", "google", "read the news about", "I want the latest news about", "do a web search for", "go online for", "find me the newest about", "what do we hear about", "is anything new with", "are there news about", "look up what is new about", "can you find the latest news of", "show me the latest news about", "could you search the internet for", "what can you find about") for w in ("", "", " today", " now", " online", " on the web", " this {day}", " in the news")),
        *("the {query}, what is new", "the {query}: search for it", "any news on the {query} today", "news about the {query}, please", "today's news about the {query}", "what about the {query} today, is there news"),
        *("how is the {query} today", "is there anything new today on the {query}", "the latest about the {query}", "I wonder what is new about the {query}"),
    ),
}
ASKS["check_stock"] += (
    *(f"{v} {{product}}" for v in ("when could I buy", "when may I have", "when do I get", "how soon can I get", "how soon could I have", "when will I get", "where can I get", "can I get", "could I get", "may I get", "any chance to get", "when is there")),
    *("any {product} for me", "some {product} left for us", "is any {product} left over", "do you have any {product} left", "could you see if {product} is there", "can you check whether {product} is in stock", "please check if {product} is in the shop", "could you check the stock of {product}"),
    *("when can we get {product} again", "when can you send me {product}", "when can one buy {product}", "is there {product} left for me", "not any {product} left"),
)
ASKS["open_ticket"] += (
    *(f"{v} {{subject}} {w}" for v in ("report", "announce", "register", "record", "I report", "please report", "let me report", "we report", "mention", "submit") for w in ("with {priority} priority", "as {priority}", "as a {priority} ticket", "with a priority of {priority}", "at {priority} priority")),
    *("report that {subject} is broken, priority {priority}", "report: {subject}, {priority} priority", "report the {subject}, {priority}", "{priority} ticket on {subject} is what I need", "we need a {priority} ticket on {subject}", "could you make a ticket for {subject}, {priority} priority"),
    *("can you open a ticket on {subject} at {priority} priority", "I want to report {subject}, priority is {priority}", "we have to report {subject}, a {priority} priority", "send in {subject}, priority {priority}", "note {subject}, priority {priority}", "log {subject}, priority {priority}"),
)
ASKS["find_order"] += (
    *("could you find order {order}", "can you check my order {order}", "would you check on order {order}", "what has happened to my order {order}", "any news about order {order}", "is there any news of {order}", "what is with order {order}"),
    *("please check the order {order}", "check up on order {order}", "can order {order} be found", "where did order {order} go"),
)
ASKS["find_account"] += (
    *("could you find the account of {email}", "can you open my account, {email}", "I am {email}, find my account", "I am {email}, show me my account", "open the account of {email}", "please see the account of {email}", "see my account under {email}"),
    *("show my account, it is {email}", "look at my account, {email}", "my account is {email}, open it", "what is the account of {email}"),
)
ASKS["set_timer"] += (
    *("remind me of {label} after {minutes} minutes", "remind us of {label} in {minutes} minutes", "please remind me in {minutes} minutes of {label}", "can you start {minutes} minutes for {label}", "could you set a timer for {label}, {minutes} minutes"),
    *("a timer of {minutes} minutes called {label}", "a timer named {label} of {minutes} minutes", "timer of {minutes} minutes, it is for {label}"),
)
ASKS["set_alarm"] += (
    *("could you make an alarm for {label} at {time}", "can you set an alarm at {time}, for {label}", "I wake up at {time} for {label}, make an alarm", "I get up at {time}, the alarm is for {label}", "an alarm at {time} for {label}", "one alarm for {label}, it is at {time}"),
    *("we get up at {time} for {label}", "set the alarm, I get up at {time} for {label}"),
)
ASKS["add_item"] += (
    *("could you put {item} on the {list} list", "can you add {item} to my {list} list", "do not forget {item} for the {list} list", "I must not forget {item}, put it on the {list} list", "do not forget to put {item} on the {list} list", "let me not forget {item}, it goes on the {list} list"),
    *("place {item} in the {list} list", "please place {item} on my {list} list", "drop {item} on the {list} list"),
)
ASKS["play_music"] += (
    *("could you start {title} in the {room}", "can you play {title} on the {room} speaker", "I would like {title} in the {room}", "I love {title}, play it in the {room}", "we would love to hear {title} in the {room}", "bring {title} to the {room}", "bring some {title} into the {room}"),
)
ASKS["clean_floor"] += (
    *("could you do the {room} in {mode} mode", "can you clean the {room} floor, {mode} mode", "make the {room} clean in {mode} mode", "the robot can do a {mode} clean in the {room}", "let the robot do a {mode} clean of the {room}"),
)
ASKS["read_sensor"] += (
    *("could you read the {kind} in the {room}", "can you check the {kind} of the {room}", "please check the {kind} in the {room}", "which {kind} is in the {room}", "which {kind} does our {room} have", "the {kind} of the {room}, please", "how much {kind} does the {room} have"),
)
# Questions about facts and sums in other words than the built-in templates; {s}, {a}, {b}, {t}, {one}, {many} as there.
FACTS = {
    "capital": ("which town is the capital of {s}?", "do you remember the capital of {s}?", "{s}: what is its capital?", "give me the capital of {s}.", "say the capital of {s}.", "what is the capital town of {s}?", "which one is the capital of {s}?", "the capital of {s}, please.", "tell me which city is the capital of {s}.", "I need the capital of {s}.", "what do they call the capital of {s}?", "which is {s}'s capital?", "which city is the capital in {s}?"),
    "colour": ("which colour does {s} have?", "what colour has {s}?", "say the colour of {s}.", "give me the colour of {s}.", "{s}: which colour?", "of what colour is {s}?", "name the colour that {s} has.", "the colour of {s}, please.", "{s} is of which colour?", "I need the colour of {s}."),
    "legs": ("{s} has what number of legs?", "the number of legs of {s}, please.", "count the legs of {s}.", "say how many legs {s} has.", "give me the number of legs of {s}.", "how many legs are on {s}?", "{s} walks on how many legs?", "I wonder how many legs {s} has.", "do you know the number of legs of {s}?"),
    "opposite": ("give me the opposite of {s}.", "say the opposite of {s}.", "the opposite of {s}, please.", "which is the opposite of {s}?", "the opposite of {s} is what?", "I need the opposite of {s}.", "which word means the opposite of {s}?", "what would be the opposite of {s}?"),
    "young": ("what is the name for a young {s}?", "do you know the word for a young {s}?", "say what a young {s} is called.", "give me the word for a young {s}.", "how is a young {s} called?", "a young {s} has what name?", "name a young {s}.", "which name has a young {s}?", "what is it called, a young {s}?"),
    "author": ("name who wrote {s}.", "give me the author of {s}.", "say who wrote {s}.", "who has written {s}?", "by whom is {s}?", "tell me the author of {s}.", "do you know the author of {s}?", "the author of {s}, please.", "what is the author of {s} called?", "{s} is by whom?"),
    "continent": ("give me the continent of {s}.", "say the continent of {s}.", "which continent has {s}?", "the continent of {s}, please.", "{s} is in which continent?", "{s} belongs to which continent?", "do you know on which continent {s} is?", "what is {s}'s continent?", "which continent is {s} on?", "in what continent is {s}?"),
}
SUMS = {
    "times": ("we have {a} {many} with {b} {t} each. How many {t} are that?", "I bought {a} {many}, each with {b} {t}. How many {t} did I buy?", "if each {one} has {b} {t}, how many {t} do {a} {many} have?", "every {one} holds {b} {t}; how many {t} are in {a} {many}?", "how many {t} are there in {a} {many} of {b}?", "{a} {many} with {b} {t} in each: how many {t}?", "they sold {a} {many} with {b} {t} in each. How many {t} are there?", "I got {a} {many} of {b} {t} each. How many {t} have I?", "in each of {a} {many} there are {b} {t}. How many {t} are there?", "{a} {many}, {b} {t} in each. What is the number of {t}?"),
    "plus": ("I had {a} {t} and got {b} more. How many {t} do I have?", "we had {a} {t} and found {b} more. How many {t} do we have?", "she has {a} {t} and gets {b} more. How many {t} is that?", "{a} {t} and {b} more {t}: how many {t}?", "how many {t} make {a} {t} and {b} {t}?", "how many {t} do we have with {a} {t} and {b} {t}?", "to {a} {t} come {b} {t}. How many {t} are there?", "they had {a} {t} and bought {b} more. How many {t} have they?"),
    "minus": ("he had {a} {t} and {b} are gone. How many {t} are left?", "we had {a} {t} and lost {b}. How many {t} have we left?", "they had {a} {t} and gave away {b}. How many are left?", "there were {a} {t} and we lost {b}. How many are left?", "I had {a} {t} and sold {b}. How many {t} are left?", "{a} {t}, {b} are gone: how many {t} are left?", "from {a} {t} we took {b}. How many {t} are left?", "of {a} {t} I gave away {b}. How many {t} do I still have?"),
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
    if grammar is None:  # Annie's tools have their own templates
        own = {"my {t}": "my {query}"}, {"{t}": "the {query}"}
        found = []
        for questions, change in zip((PHRASES.memory_questions, PHRASES.web_questions), own, strict=True):
            (old, new), = change.items()
            found += [core(t.replace(old, new)) for s in ("calibration", "gate") for t in questions[s]]
        return tuple(found)
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
    return finished(text.format(day=rng.choice(WORDS.days), **arguments))


def question(rng: random.Random, exchange: Exchange) -> str | None:
    """Return a fact's or a sum's question in other words than the built-in ones, or None where there are none."""
    if exchange.category == "factual":
        kinds = [k for k, pairs in WORDS.facts.items() if (exchange.subject, exchange.answer) in [tuple(p) for p in pairs]]
        text = rng.choice(FACTS[kinds[0]]).format(s=exchange.subject)
        held = [t.format(s=exchange.subject) for s in ("calibration", "gate") for t in PHRASES.facts[kinds[0]][s]]
    else:
        found = SUM.fullmatch(exchange.thought)
        if found is None:
            return None
        a, sign, b = found.group(1, 2, 3)
        one, many = rng.choice(WORDS.containers)
        if sign == "times":
            many = exchange.reply.split(" ")[1]
            one = next(o for o, m in WORDS.containers if m == many)
        values = {"a": a, "b": b, "t": exchange.subject, "one": one, "many": many}
        text = rng.choice(SUMS[sign]).format(**values)
        held = [t.format(**values) for s in ("calibration", "gate") for t in PHRASES.sums[sign][s]]
    if any(core(h) in core(text) for h in held):
        return None
    return text[:1].upper() + text[1:]


def cannot(rng: random.Random, persona: str, topic: str) -> str:
    """Return a request that no tool of the persona fills."""
    while True:
        text = rng.choice(OPENINGS) + rng.choice(CANNOT) + " {topic}" + rng.choice(CLOSINGS)
        if not any(h in core(text) for h in held_out(persona)):
            return finished(text.format(topic=topic))
