"""Everyday prompts from templates: what people ask a small assistant, in more ways than a run can use up.

The 20 questions of ``card.py`` are left out: they are what a model is looked at with.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ..card import QUESTIONS

_TEMPLATES = (
    "What is {}?", "Tell me about {}.", "Explain {} in simple terms.", "Write a short story about {}.",
    "Write a poem about {}.", "Give me three facts about {}.", "Why is {} important?", "What do you think about {}?",
    "Can you help me understand {}?", "Write a short paragraph about {}.", "How would you describe {} to a child?",
    "What are the advantages and disadvantages of {}?", "Give me five tips about {}.", "Tell me a joke about {}.",
    "What is the history of {}?", "Write a letter to a friend about {}.", "How can I learn more about {}?",
    "I am interested in {}. Where should I start?", "What are common mistakes with {}?", "List three examples of {}.",
    "Summarize what you know about {}.", "What questions should I ask about {}?", "Write a slogan for {}.",
    "What is the best thing about {}?", "Compare {} with something similar.",
)  # fmt: skip
_TOPICS = (
    "dogs", "the ocean", "a brave mouse", "winter", "cooking", "healthy food", "exercise", "sleep", "friendship",
    "love", "music", "painting", "photography", "gardening", "trees", "flowers", "the moon", "the sun", "the stars",
    "planets", "black holes", "rockets", "airplanes", "trains", "bicycles", "cars", "electric cars", "robots",
    "artificial intelligence", "the internet", "smartphones", "video games", "chess", "football", "basketball",
    "tennis", "swimming", "running", "yoga", "meditation", "stress", "happiness", "fear", "dreams", "memory",
    "the brain", "the heart", "blood", "bones", "muscles", "vitamins", "water", "air", "fire", "electricity",
    "magnets", "light", "sound", "heat", "energy", "atoms", "molecules", "chemistry", "physics", "biology",
    "mathematics", "algebra", "geometry", "statistics", "prime numbers", "computers", "programming", "Python",
    "JavaScript", "databases", "algorithms", "cats and dogs", "elephants", "whales", "dolphins", "birds", "bees",
    "butterflies", "spiders", "snakes", "dinosaurs", "bread", "coffee", "tea", "chocolate", "cheese", "apples",
    "rice", "soup", "pizza", "salad", "a birthday party", "a wedding", "a long journey", "a lost key", "an old house",
    "a dragon", "a pirate", "a detective", "a teacher", "a doctor", "a farmer", "a magician", "school", "homework",
    "university", "work", "a job interview", "saving money", "taxes", "banks", "the stock market", "inflation",
    "democracy", "laws", "history", "ancient Egypt", "ancient Rome", "the Middle Ages", "the Renaissance",
    "World War II", "the industrial revolution", "Africa", "Asia", "Europe", "Australia", "Canada", "Brazil", "India",
    "China", "Japan", "France", "Italy", "Spain", "Germany", "New York", "London", "mountains", "rivers", "deserts",
    "rainforests", "volcanoes", "earthquakes", "hurricanes", "climate change", "recycling", "plastic", "solar power",
    "wind power", "books", "libraries", "newspapers", "movies", "theater", "dancing", "jazz", "classical music",
    "guitars", "pianos", "fashion", "shoes", "colors", "time", "clocks", "calendars", "maps", "languages", "grammar",
    "spelling", "writing emails", "public speaking", "making friends", "moving to a new city", "raising children",
    "pets", "camping", "fishing", "hiking", "the weather", "rain", "snow", "rainbows", "evolution", "genetics",
    "bacteria", "viruses", "vaccines", "medicine", "first aid", "the immune system", "the eye", "the ear", "taste",
)  # fmt: skip
_TASKS = (
    "How do I bake {}?", "Give me a simple recipe for {}.", "How do you make {} at home?", "What goes well with {}?",
)  # fmt: skip
_DISHES = ("bread", "cookies", "an apple pie", "tomato soup", "fried rice", "an omelette", "pasta sauce", "lemonade",
           "a chocolate cake", "mashed potatoes", "a fruit salad", "hummus", "waffles", "chili", "granola")  # fmt: skip
_CAPITALS = ("Germany", "Italy", "Spain", "Japan", "Canada", "Brazil", "India", "Egypt", "Kenya", "Norway", "Sweden",
             "Poland", "Greece", "Turkey", "Mexico", "Peru", "Chile", "Australia", "China", "Russia", "Portugal",
             "Ireland", "Austria", "Hungary", "Thailand", "Vietnam", "Cuba", "Argentina", "Nigeria")  # fmt: skip
_LANGUAGES = ("French", "German", "Italian", "Portuguese", "Spanish")
_WORDS = ("good night", "thank you", "how are you", "I love you", "see you tomorrow", "where is the station", "water",
          "my name is Anna", "happy birthday", "the cat sleeps", "excuse me", "welcome")  # fmt: skip
_FUNCTIONS = ("reverses a string", "finds the largest number in a list", "checks whether a number is prime",
              "counts the vowels in a text", "sorts a list", "multiplies two numbers", "computes a factorial",
              "reads a file line by line", "removes duplicates from a list", "converts Celsius to Fahrenheit",
              "prints the Fibonacci numbers", "finds the average of a list", "checks for a palindrome")  # fmt: skip
_SMALL_TALK = (
    "Hi!", "Hey there!", "Good morning!", "Good evening!", "Hi, how is it going?", "What's up?", "Nice to meet you.",
    "What can you do?", "What is your name?", "Who made you?", "Are you a robot?", "Do you have feelings?",
    "How old are you?", "Where do you live?", "Can you help me?", "I am bored.", "I am tired today.", "I feel lonely.",
    "I had a great day!", "I am nervous about tomorrow.", "Tell me something interesting.", "Tell me a story.",
    "Make me laugh.", "What should I eat tonight?", "What should I do this weekend?", "Can you recommend a book?",
    "Can you recommend a movie?", "Give me some advice.", "I cannot sleep. What can I do?", "Thank you!",
    "Do you like music?", "What is your favorite color?", "Let's play a game.", "Ask me a question.", "Goodbye!",
    "How do I stay motivated?", "How do I become a better listener?", "I feel stressed at work. What can I do?",
    "What makes a good friend?", "How can I save money?", "How do I start a conversation?", "Help me plan my day.",
)  # fmt: skip


def everyday() -> Iterator[str]:
    """All of them, each once."""
    yield from (text for text in _all() if text not in QUESTIONS)


def about(title: str, index: int) -> str:
    """A question about the title of an article; the index picks the way to ask."""
    ways = ("What is {}?", "Tell me about {}.", "Who or what is {}?", "Give me three facts about {}.",
            "Explain {}.", "Write a short encyclopedia entry about {}.", "What do you know about {}?",
            "Why is {} known?")  # fmt: skip
    return ways[index % len(ways)].format(title)


def sums() -> Iterator[str]:
    """Small arithmetic."""
    ways = ("What is {}?", "Calculate {}.", "How much is {}?", "{} = ?")
    for index, (a, b) in enumerate(product(range(1, 21), range(1, 21))):
        for sign in "+-*":
            text = ways[(index + ord(sign)) % len(ways)].format(f"{a} {sign} {b}")
            if text.replace(" ", "") != "Whatis2+2?":
                yield text


def _all() -> Iterator[str]:
    yield from _SMALL_TALK
    for template, topic in product(_TEMPLATES, _TOPICS):
        yield template.format(topic)
    for template, dish in product(_TASKS, _DISHES):
        yield template.format(dish)
    for country in _CAPITALS:
        yield f"What is the capital of {country}?"
        yield f"Tell me about the people of {country}."
    for language, word in product(_LANGUAGES, _WORDS):
        yield f'Translate "{word}" to {language}.'
        yield f'How do you say "{word}" in {language}?'
    for function in _FUNCTIONS:
        yield f"Write a Python function that {function}."
        yield f"Write a JavaScript function that {function}."
