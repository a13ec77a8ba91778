"""Twenty chat prompts of different kinds, one with several scripts."""

from __future__ import annotations

from compiled_engine.tokenizer import Tokenizer

QUESTIONS = [
    "What is the capital of France?",
    "Name three primary colours.",
    "Write a haiku about the sea.",
    "Explain gravity to a child in two sentences.",
    "What is 12 plus 30?",
    "Translate 'good morning' into Spanish.",
    "List the planets of the solar system.",
    "Who wrote Hamlet?",
    "Give me a recipe for pancakes.",
    "What does HTTP stand for?",
    "Write a Python function that reverses a string.",
    "Why is the sky blue?",
    "Summarise the plot of Cinderella.",
    "What is the boiling point of water in Celsius?",
    "Suggest a name for a cat.",
    "How many days are in a leap year?",
    "Tell me a joke.",
    "What is photosynthesis?",
    "Continue the story: Once upon a time,",
    "L'Étoile, la Cité et 東京 — what are they?",
]


def chat_prompt(tokenizer: Tokenizer, question: str) -> list[int]:
    """The question as the model's chat template renders it, as token ids."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": question}])
    return tokenizer.encode(text, add_special_tokens=False)
