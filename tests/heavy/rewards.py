"""Reward functions for the heavy tests, found by their dotted path."""


def first_wins(prompts, completions, **columns):
    """1 for the first completion that a process scores, 0 for the others."""
    return [float(number == 0) for number in range(len(completions))]
