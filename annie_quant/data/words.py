"""What Annie knows and talks about in the built-in conversations: facts, topics, feelings, things.

Facts are knowledge and are the same in every split. Tool topics are not: each split has its own, so that a right tool
call in a gate cannot have been learned by heart.
"""

# ruff: noqa: SIM905 (lists of words read better as one text)

from __future__ import annotations

SPLITS = ("train", "calibration", "gate")


def pairs(text: str) -> tuple[tuple[str, str], ...]:
    """'Japan Tokyo, New Delhi: India' style lists: entries by comma, the two sides by colon or by the one space."""
    out = []
    for entry in text.split(","):
        left, right = entry.split(":") if ":" in entry else entry.split()
        out.append((left.strip(), right.strip()))
    return tuple(out)


CAPITALS = pairs(
    "Japan Tokyo, France Paris, Italy Rome, Spain Madrid, Germany Berlin, England London, Norway Oslo, Sweden Stockholm, "
    "Finland Helsinki, Denmark Copenhagen, Poland Warsaw, Austria Vienna, Greece Athens, Portugal Lisbon, Ireland Dublin, "
    "Hungary Budapest, Egypt Cairo, Kenya Nairobi, India: New Delhi, China Beijing, Russia Moscow, Canada Ottawa, "
    "Cuba Havana, Peru Lima, Chile Santiago, Turkey Ankara, Iran Tehran, Iraq Baghdad, Thailand Bangkok, Vietnam Hanoi, "
    "Nepal Kathmandu, Belgium Brussels, Switzerland Bern, Romania Bucharest, Bulgaria Sofia, Serbia Belgrade, "
    "Croatia Zagreb, Ukraine Kyiv, Qatar Doha, Ghana Accra, Iceland Reykjavik, Australia Canberra"
)
COLOURS = pairs(
    "a banana: yellow, snow white, grass green, the sky: blue, coal black, a carrot: orange, chocolate brown, "
    "a lemon: yellow, a strawberry: red, milk white, an elephant: grey, a tomato: red"
)
LEGS = pairs(
    "a spider: 8, a cat: 4, a dog: 4, a bird: 2, an ant: 6, a bee: 6, a horse: 4, a cow: 4, a chicken: 2, a crab: 10"
)
OPPOSITES = pairs(
    "hot cold, big small, up down, fast slow, happy sad, open closed, left right, full empty, old new, early late, "
    "wet dry, hard soft, light dark, strong weak, rich poor, high low"
)
YOUNG = pairs(
    "dog puppy, cat kitten, cow calf, horse foal, sheep lamb, bear cub, duck duckling, frog tadpole, lion cub, goat kid"
)
AUTHORS = pairs(
    "Hamlet: William Shakespeare, Emma: Jane Austen, War and Peace: Leo Tolstoy, Oliver Twist: Charles Dickens, "
    "Animal Farm: George Orwell, Dracula: Bram Stoker, Frankenstein: Mary Shelley, Faust: Goethe, The Odyssey: Homer"
)
CONTINENTS = pairs(
    "Kenya Africa, Ghana Africa, Egypt Africa, Japan Asia, China Asia, India Asia, Nepal Asia, Thailand Asia, "
    "France Europe, Italy Europe, Spain Europe, Norway Europe, Poland Europe, Greece Europe, Peru: South America, "
    "Chile: South America, Canada: North America, Cuba: North America"
)

# Everyday things for small sums: (container, things in it).
BOXES = ("box:boxes", "bag:bags", "basket:baskets", "jar:jars", "shelf:shelves", "tray:trays", "drawer:drawers")
THINGS = ("balls", "apples", "books", "coins", "eggs", "cups", "pens", "cookies", "stones", "flowers", "shirts", "keys")

# Topics that only calibration, or only gates, speak of; the train split has every other pair of words.
_MINE_CALIBRATION = (
    "garden party,guitar repair,car trip,kitchen plan,cat photo,wedding cake,piano order,bike bag,"
    "summer recipe,bread class,train meeting,science book,old phone,red coat,dog food,house party,winter film,"
    "school talk,tea game,music bill"
).split(",")
_MINE_GATE = (
    "robot party,garden repair,trip to Norway,guitar order,birthday plan,car meeting,book recipe,morning walk,"
    "kitchen list,job talk,cat album,wedding class,house paint,piano trip,bike repair,music project,"
    "summer cake,bread order,chess meeting,phone card,winter run,photo class,boat plan,film club,"
    "science project,team photo,old guitar,red car,dog ticket,school project,tea party,travel plan,new piano,"
    "train trip"
).split(",")
_WEB_CALIBRATION = (
    "the weather in Vienna,the price of tea,the chess match,the election in Chile,the oil market,"
    "the bus strike,the weather in Oslo,the rocket launch,the storm in Ireland,the price of sugar,"
    "the book show,the fire in Spain,the train show,the coffee crisis,the bank awards"
).split(",")
_WEB_GATE = (
    "the weather in Madrid,the price of silver,the tennis awards,the election in Kenya,the coffee market,"
    "the phone strike,the weather in Lisbon,the price of rice,the space show,the football awards,"
    "the chess awards,the storm in Norway,the price of eggs,the weather in Dublin,the new car,the oil strike,"
    "the film market,the election in Poland,the weather in Athens,the storm in Italy,the space crash,"
    "the gold crisis,the weather in Moscow,the fire in Turkey,the music show,the price of cheese,"
    "the bank crash,the tennis show,the election in Egypt,the bread crisis,the weather in Havana,"
    "the car strike"
).split(",")
_MINE_FIRST = (
    "robot,garden,guitar,birthday,car,book,morning,kitchen,job,cat,wedding,house,piano,bike,music,summer,"
    "bread,chess,phone,winter,photo,boat,film,science,team,school,tea,travel,train,dog,bank,tax,family,office,"
    "holiday,dance,coffee,new,old,red"
).split(",")
_MINE_SECOND = (
    "project,plan,lessons,visit,party,repair,club,run,paint,interview,food,speech,papers,keys,class,bag,ride,"
    "list,friend,recipe,game,bill,coat,album,order,card,ticket,night,talk,meeting,walk,cake,dinner,trip,"
    "camera,photo,show,course,guitar,car,piano"
).split(",")
_WEB_FIRST = (
    "football,tennis,chess,film,music,book,space,car,train,bank,bread,oil,gold,coffee,phone,bus,tea,dance".split(",")
)
_WEB_SECOND = "match,final,awards,strike,crisis,show,market,crash,launch,talks,fair,report".split(",")
_GOODS = "gold,coffee,oil,bread,milk,silver,rice,eggs,cheese,tea,sugar,salt,apples,gas,paper,wood,tickets,phones".split(
    ","
)


def _train(everything: list[str], *held_out: list[str]) -> tuple[str, ...]:
    """All topics but those held out, in an order that does not depend on the run."""
    away = {topic for topics in held_out for topic in topics}
    return tuple(sorted(set(everything) - away))


MY_TOPICS = {
    "train": _train(
        [f"{a} {b}" for a in _MINE_FIRST for b in _MINE_SECOND if a != b] + [f"trip to {c}" for c, _ in CAPITALS],
        _MINE_CALIBRATION,
        _MINE_GATE,
    ),
    "calibration": tuple(_MINE_CALIBRATION),
    "gate": tuple(_MINE_GATE),
}
WEB_TOPICS = {
    "train": _train(
        [f"the {a} {b}" for a in _WEB_FIRST for b in _WEB_SECOND]
        + [f"the price of {g}" for g in _GOODS]
        + [f"the {what} in {place}" for what in ("weather", "storm", "fire") for pair in CAPITALS for place in pair]
        + [f"the election in {c}" for c, _ in CAPITALS],
        _WEB_CALIBRATION,
        _WEB_GATE,
    ),
    "calibration": tuple(_WEB_CALIBRATION),
    "gate": tuple(_WEB_GATE),
}
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

# feeling, what Annie says to it, what she adds
FEELINGS = (
    ("tired", "That sounds like a lot.", "Get some rest tonight, you have earned it."),
    ("happy", "That is lovely to hear.", "Enjoy the moment, you deserve it."),
    ("sad", "I am sorry to hear that.", "I am here if you want to talk."),
    ("nervous", "That is easy to understand.", "Take a slow breath, you will do fine."),
    ("bored", "That happens to everyone.", "Maybe a short walk would help."),
    ("proud", "You should be.", "That took real work, well done."),
    ("angry", "I can see why.", "Let us take it one step at a time."),
    ("lonely", "I am glad you told me.", "I am here, and we can talk as long as you like."),
    ("excited", "How wonderful.", "I would love to hear more about it."),
    ("worried", "I understand.", "Tell me more, and we will look at it together."),
)
CAUSES = {
    "train": tuple(
        "after work,about my trip,about the exam,after the meeting,because of the rain,about my new job,after the game,"
        "about my sister,since this morning,about the move,after dinner with my friends,about my garden,after the call,"
        "about the test,because of my neighbour,about the party".split(",")
    ),
    "calibration": tuple("after my run,about my brother,because of the cold,about the house,after the film".split(",")),
    "gate": tuple(
        "after the exam,about my job,because of the game,about the meeting,after my trip,about my friends,since dinner,"
        "because of the test,after the party,about the rain,about my neighbour,after the move".split(",")
    ),
}

ANIMALS = ("fox", "bear", "owl", "cat", "dog", "horse", "frog", "duck", "lion", "goat")
PLACES = ("forest", "city", "garden", "mountain", "village", "desert", "river", "castle", "island", "market")
DISHES = ("soup", "bread", "pasta", "salad", "rice", "pancakes", "tea", "stew", "pie", "curry")

DEVICES = (
    "play some music,set a timer for {n} minutes,turn on the lights,call my mother,order a pizza,book a taxi,"
    "take a photo,open the door,send an email,turn up the heating,start the washing machine,lock the car,print a page,"
    "water the plants,buy a ticket,pay the bill,make coffee,close the window,start the film,charge the phone"
).split(",")
