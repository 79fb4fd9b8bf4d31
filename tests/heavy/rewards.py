"""Reward functions for the heavy tests, found by their dotted path."""

import os


def breaks_in_process_1(prompts, completions, **columns):
    """Too few scores, in one process alone."""
    return [1.0] if os.environ["LOCAL_RANK"] == "1" else [0.0] * len(completions)


def cannot_score_in_process_1(prompts, completions, **columns):
    """Raises for whatever one of the processes has to score."""
    if os.environ["LOCAL_RANK"] == "1":
        raise ValueError("not here")
    return [float(number % 2) for number in range(len(completions))]
