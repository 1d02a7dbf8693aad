"""Twenty prompts of different kinds, for comparing a model's answers with a reference's."""

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Once upon a time, in a village by the sea,",
    "The three primary colors are",
    "To make a cup of tea, first",
    "SELECT name, age FROM people WHERE",
    "Dear Sir or Madam,\n\nI am writing to",
    "Photosynthesis is the process by which",
    "In 1969, Apollo 11",
    "1, 1, 2, 3, 5, 8, 13,",
    "The quick brown fox jumps over the lazy dog. The lazy dog",
    "Ingredients:\n- 2 cups of flour\n- 1 cup of sugar\n-",
    "Question: What is 12 plus 30?\nAnswer:",
    "The mitochondria is often called",
    "A good night's sleep is important because",
    "Shakespeare wrote many plays, among them",
    '{"name": "Alice", "age": 30, "city":',
    "El gato se sentó en la",
    "Über die Brücke ging ein alter Mann, der",
)
