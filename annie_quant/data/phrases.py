"""The templates of the built-in conversations, a list for each split. What a template must keep is its split: a line
that moves from one list to another makes a gate's prompt known to the model."""

from __future__ import annotations

from typing import Any


def by_split(train: str, calibration: str, gate: str) -> dict[str, tuple[str, ...]]:
    """Templates separated by | for each split."""
    return {
        "train": tuple(train.split("|")),
        "calibration": tuple(calibration.split("|")),
        "gate": tuple(gate.split("|")),
    }


OPENERS = by_split(
    "|||Annie, |Hey Annie, |Tell me, |Please tell me, |Can you help me: |Hello, |Good question for you: |I wonder, "
    "|Hi, "
    "|Hello there, |Hey there, |Hi again, |Hello again, |Help me with this: |Please, ",
    "||Okay Annie, |Now tell me, ",
    "||||Hi Annie, |Hello Annie, |Please help me: |Hey, ",
)

FACTS = {
    "capital": by_split(
        "which city is the capital of {s}?|do you know the capital of {s}?|what is {s}'s capital?"
        "|name the capital of {s}."
        "|the capital of {s} is which city?|what is the name of the capital of {s}?|{s} has which capital?"
        "|I forgot the capital of {s}.|what city is the capital of {s}?|can you tell me the capital of {s}?",
        "could you name the capital of {s}?|what is the capital city of {s}?",
        "what is the capital of {s}?|which is the capital of {s}?|tell me the capital of {s}."
        "|which city is {s}'s capital?",
    ),
    "colour": by_split(
        "what colour is {s}?|which colour is {s}?|do you know the colour of {s}?|tell me the colour of {s}."
        "|what is the colour of {s}?|{s} has which colour?|what colour would you give {s}?",
        "can you tell me the colour of {s}?",
        "which colour has {s}?|name the colour of {s}.|what colour does {s} have?",
    ),
    "legs": by_split(
        "how many legs does {s} have?|what is the number of legs of {s}?|do you know how many legs {s} has?"
        "|tell me how many legs {s} has.|how many legs are there on {s}?|{s} stands on how many legs?",
        "how many legs has {s}?",
        "can you tell me how many legs {s} has?|name the number of legs of {s}.|{s} has how many legs?",
    ),
    "opposite": by_split(
        "what is the opposite of {s}?|which word is the opposite of {s}?|tell me the opposite of {s}."
        "|do you know the opposite of {s}?|what is another way to say not {s}?|{s} has which opposite?",
        "can you tell me the opposite of {s}?",
        "name the opposite of {s}.|what word is the opposite of {s}?|the opposite of {s} is which word?",
    ),
    "young": by_split(
        "what is a young {s} called?|what do you call a young {s}?|which word means a young {s}?"
        "|what is the word for a young {s}?|a young {s} has which name?"
        "|tell me what a young {s} is called.",
        "how do you call a young {s}?",
        "what is the name of a young {s}?|do you know what a young {s} is called?|a young {s} is called what?",
    ),
    "author": by_split(
        "who wrote {s}?|who is the author of {s}?|tell me who wrote {s}.|which author wrote {s}?"
        "|{s} was written by whom?|who was the author of {s}?",
        "can you tell me who wrote {s}?",
        "do you know who wrote {s}?|name the author of {s}.|what is the name of the author of {s}?",
    ),
    "continent": by_split(
        "which continent is {s} in?|on which continent is {s}?|what continent is {s} on?|tell me the continent of {s}."
        "|{s} lies on which continent?|where is {s}, on which continent?|name the continent of {s}."
        "|which continent does {s} belong to?",
        "do you know the continent of {s}?",
        "{s} is on which continent?|what is the continent of {s}?|which is the continent of {s}?",
    ),
}
STRUCTURE = {
    "capital": "the capital of {s} is {a}.",
    "colour": "the colour of {s} is {a}.",
    "legs": "{s} has {a} legs.",
    "opposite": "the opposite of {s} is {a}.",
    "young": "a young {s} is called a {a}.",
    "author": "{s} was written by {a}.",
    "continent": "{s} is in {a}.",
}

SUMS = {
    "times": by_split(
        "there are {a} {many} with {b} {t} in each. How many {t} are there?"
        "|I bought {a} {many} of {b} {t}. How many {t} is that?"
        "|each {one} holds {b} {t}. How many {t} are in {a} {many}?|what do {a} {many} of {b} {t} make?"
        "|we have {a} {many}, each with {b} {t}. How many {t} do we have?"
        "|if one {one} has {b} {t}, how many do {a} {many} have?"
        "|how many {t} do {a} {many} of {b} {t} hold?|how many {t} will {a} {many} with {b} {t} each give?"
        "|I have {a} {many}. Each has {b} {t}. How many {t} is that?"
        "|how many {t} do we get from {a} {many} with {b} {t} each?",
        "how many {t} are in {a} {many} of {b} {t}?|I see {a} {many} with {b} {t} each. How many {t} is that?",
        "I have {a} {many} with {b} {t} each. How many {t} do I have?"
        "|how many {t} are there in {a} {many} with {b} {t} in each?"
        "|we bought {a} {many}, each with {b} {t}. How many {t} are there?"
        "|if each {one} holds {b} {t}, how many {t} are in {a} {many}?",
    ),
    "plus": by_split(
        "I have {a} {t} and get {b} more. How many {t} do I have?"
        "|there are {a} {t} on the table and {b} more come. How many are there?"
        "|what do {a} {t} and {b} {t} make?|she had {a} {t} and found {b} more. How many {t} is that?"
        "|how many {t} are there when {b} {t} come to {a} {t}?|how many {t} is {a} {t} and {b} {t} more?"
        "|he had {a} {t} and bought {b} more. How many {t} does he have?",
        "how many {t} are {a} {t} and {b} more?",
        "I had {a} {t} and found {b} more. How many {t} do I have?"
        "|we have {a} {t} and get {b} more. How many {t} is that?"
        "|how many {t} do {a} {t} and {b} {t} make?",
    ),
    "minus": by_split(
        "I had {a} {t} and gave away {b}. How many {t} are left?"
        "|there were {a} {t} and {b} are gone. How many are left?"
        "|she had {a} {t} and lost {b}. How many {t} are left?|we take {b} {t} from {a}. How many {t} are left?"
        "|how many {t} are left when {b} of {a} are gone?|he had {a} {t} and lost {b}. How many are left?"
        "|there are {a} {t} and we take {b} away. How many are left?",
        "from {a} {t} I lost {b}. How many are left?",
        "I had {a} {t} and lost {b}. How many {t} are left?|there were {a} {t} and we gave away {b}. How many are left?"
        "|she had {a} {t} and {b} are gone. How many {t} are left?",
    ),
}

# what the user says, how Annie greets back; what follows the greeting, and her second sentence
GREET = {
    "hello": {
        "train": (
            ("Hi.", "Hi there."),
            ("Hello.", "Hello."),
            ("Hey Annie.", "Hey."),
            ("Good morning.", "Good morning."),
            ("Good evening.", "Good evening."),
            ("Hello there.", "Hello."),
            ("Hi, it is me.", "Hi there."),
            ("Good afternoon.", "Good afternoon."),
            ("Morning.", "Good morning."),
            ("Annie?", "I am here."),
            ("Good morning, my friend.", "Good morning."),
            ("Hey.", "Hey."),
            ("Good evening, Annie.", "Good evening."),
        ),
        "calibration": (
            ("Hey there.", "Hey."),
            ("Hello, my friend.", "Hello."),
            ("Hi, good morning.", "Good morning."),
            ("Hello, it is me.", "Hello."),
            ("Hi, my friend.", "Hi there."),
            ("Hey, good evening.", "Good evening."),
            ("Good morning to you.", "Good morning."),
            ("Hey, my friend.", "Hey."),
        ),
        "gate": (
            ("Hi Annie.", "Hi there."),
            ("Hello Annie.", "Hello."),
            ("Good morning, Annie.", "Good morning."),
            ("Hey, it is me.", "Hey."),
            ("Good afternoon, Annie.", "Good afternoon."),
            ("Hi there.", "Hi there."),
            ("Good evening, my friend.", "Good evening."),
            ("Hello, good morning.", "Good morning."),
        ),
    },
    "more": {
        "train": (
            ("How are you?", "I am well, thank you."),
            ("How are you today?", "I am well, thank you."),
            ("I am home.", "Welcome home."),
            ("It is {day}.", "I hope it will be a good day."),
            ("Are you there?", "Yes, I am here."),
            ("I just woke up.", "I hope you slept well."),
            ("What a day.", "Tell me about it."),
            ("How is it going?", "All is well here."),
            ("I am back.", "It is good to hear from you."),
            ("Nice to talk to you.", "It is good to hear from you."),
            ("Are you well?", "I am well, thank you."),
            ("Did you sleep well?", "I do not sleep, but thank you."),
            ("Happy {day}.", "I hope it will be a good day."),
            ("It is {day} again.", "I hope it will be a good day."),
            ("So it is {day} now.", "I hope it will be a good day."),
            ("I woke up late today.", "I hope you slept well."),
            ("I came back from work.", "Welcome home."),
            ("How was your day?", "All is well here."),
            ("How are you doing today?", "I am well, thank you."),
            ("Long day today.", "Tell me about it."),
            ("So good to talk to you again.", "It is good to hear from you."),
            ("Can you hear me?", "Yes, I hear you well."),
        ),
        "calibration": (
            ("How do you do?", "I am well, thank you."),
            ("I am here.", "It is good to hear from you."),
            ("Today is {day}.", "I hope it will be a good day."),
            ("Do you hear me?", "Yes, I hear you well."),
            ("I came home.", "Welcome home."),
            ("I slept well.", "I hope it will be a good day."),
            ("How is it?", "All is well here."),
            ("How are you now?", "I am well, thank you."),
        ),
        "gate": (
            ("How are you doing?", "I am well, thank you."),
            ("I am back home.", "Welcome home."),
            ("It is {day} today.", "I hope it will be a good day."),
            ("Are you here?", "Yes, I am here."),
            ("I woke up early.", "I hope you slept well."),
            ("How is your day going?", "All is well here."),
            ("Good to talk to you.", "It is good to hear from you."),
            ("Can you hear me well?", "Yes, I hear you well."),
            ("What a long day.", "Tell me about it."),
        ),
    },
}
THANKS = {
    "train": (
        ("Thank you.", "You are welcome."),
        ("Thanks, Annie.", "You are welcome."),
        ("Good night.", "Good night, sleep well."),
        ("Bye for now.", "Goodbye, talk to you soon."),
        ("Thanks for your help.", "You are welcome."),
        ("I have to go.", "Goodbye, talk to you soon."),
        ("Good night, Annie.", "Good night, sleep well."),
        ("That was helpful.", "You are welcome."),
        ("See you later.", "Goodbye, talk to you soon."),
    ),
    "calibration": (("Many thanks.", "You are welcome."), ("Bye.", "Goodbye, talk to you soon.")),
    "gate": (
        ("Thank you, Annie.", "You are welcome."),
        ("Thanks a lot.", "You are welcome."),
        ("Bye, Annie.", "Goodbye, talk to you soon."),
        ("Thank you for your help.", "You are welcome."),
        ("Good night, my friend.", "Good night, sleep well."),
        ("I have to go now.", "Goodbye, talk to you soon."),
    ),
}
FOLLOW = by_split(
    "And of {s}?|What about {s}?|And the capital of {s}?|And {s}?|Now for {s}?",
    "And what of {s}?",
    "And what about {s}?|What about the capital of {s}?|And for {s}?|Now what about {s}?",
)

CONVERSE = by_split(
    "I feel {f} {c}.|I am {f} {c}.|I am so {f} {c}.|I feel a bit {f} {c}.|To be honest, I am {f} {c}."
    "|I have been {f} {c}.|Today I am {f} {c}.",
    "I feel rather {f} {c}.|I am still {f} {c}.",
    "I feel so {f} {c}.|I am a bit {f} {c}.|Today I feel {f} {c}.|I have felt {f} {c}.|To be honest, I feel {f} {c}.",
)

ASK = {
    "story": by_split(
        "tell me a story about a {animal} in the {place}.|I want a long story about a {animal} in the {place}."
        "|can you tell a story of a {animal} from the {place}?",
        "please tell the story of a {animal} in a {place}.",
        "I want to hear a story about a {animal} in the {place}."
        "|please tell a long story about a {animal} from the {place}."
        "|can you tell me a story about a {animal} in the {place}?",
    ),
    "dish": by_split(
        "explain how to make {dish}.|how do I make {dish}?|tell me in detail how to make {dish}.",
        "please explain how I make {dish}.",
        "can you explain how to make {dish}?|how do you make {dish}?|please tell me how to make {dish}.",
    ),
    "trip": by_split(
        "tell me all about a trip to {country}.|help me plan a trip to {country}."
        "|what should I know about a trip to {country}?",
        "I plan a trip to {country}, tell me more.",
        "can you help me plan a trip to {country}?|I want to know all about a trip to {country}."
        "|what should I plan for a trip to {country}?",
    ),
}
LONG = {
    "story": (
        "once there was a {animal} who lived in the {place}.",
        "every morning the {animal} walked through the {place} and said hello to everyone.",
        "one day a storm came, and the {place} became dark and cold.",
        "the {animal} was nervous, but it did not run away.",
        "it helped its friends to find a dry and safe house.",
        "when the sun came back, all of them had a big dinner together.",
        "since that day the {animal} is never lonely in the {place}.",
    ),
    "dish": (
        "making {dish} is easy when you take your time.",
        "first put everything you need on the table.",
        "then wash it well and cut what is big into small pieces.",
        "next warm it slowly and keep an eye on it.",
        "add a little salt, taste it, and add more if you like.",
        "let the {dish} rest for five minutes before you bring it to the table.",
        "serve the {dish} with bread and enjoy it with your friends.",
    ),
    "trip": (
        "a trip to {country} is a lovely plan.",
        "start in {capital}, the capital, and stay there for two or three days.",
        "walk through the old city in the morning, when it is still quiet.",
        "then take the train and see the mountains and the small villages.",
        "try the bread, the soup and the tea, and talk to the people.",
        "take a warm coat and good shoes with you.",
        "book your ticket early, and {country} will be easy on your purse.",
    ),
}

MEMORY: dict[str, Any] = {
    "ask": by_split(
        "what did I tell you about my {t}?|what do you remember about my {t}?|did we talk about my {t}?"
        "|do you remember my {t}?|what did I say about my {t} last {day}?|when did I tell you about my {t}?"
        "|remind me what I said about my {t}.|have I told you about my {t}?"
        "|did we say anything about my {t}?|do you remember what we said about my {t}?|remind me of my {t}."
        "|what did you hear from me about my {t}?",
        "did I say something about my {t}?|what do you still know about my {t}?|do you recall anything about my {t}?",
        "do you remember what I told you about my {t}?|what did we say about my {t}?|did I tell you about my {t}?"
        "|remind me what I told you about my {t} on {day}.|what did I say about my {t}?",
    ),
    "found": (
        "you told me on {day} that the {t} is going well",
        "you said on {day} that the {t} must wait for {n} days",
        "on {day} you asked for help with the {t}",
    ),
}
WEB: dict[str, Any] = {
    "ask": by_split(
        "what is the latest news about {t}?|search the web for {t}.|what is new about {t}?|look up {t} for me."
        "|is there any news about {t}?|find out about {t} today.|what do they say today about {t}?"
        "|check {t} on the web."
        "|search for the latest about {t}.|do you have news about {t} today?|can you look up {t}?|find news about {t}."
        "|is there something new today about {t}?",
        "please search the web for {t}.|what is the news about {t}?|I want to hear the news about {t}."
        "|has anything happened with {t}?",
        "look up the latest news about {t}.|what is new today about {t}?|can you search the web for {t}?"
        "|is there any news today about {t}?|find the latest news about {t}.",
    ),
    "found": (
        "the news about {t} is good since {day}",
        "there are {n} new reports about {t} from {day}",
        "people talked about {t} on {day}",
    ),
}
ABSTAIN = by_split(
    "{d}.|please {d}.|can you {d}?|Annie, {d}.|could you {d} for me?|I want you to {d}.|{d} now, please.",
    "will you {d}?|{d} for me.",
    "Annie, please {d}.|could you please {d}?|can you {d} for me?|Hey Annie, {d}.|I need you to {d}.|{d}, please.",
)
