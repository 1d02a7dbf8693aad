"""Fakes for tests of anything that speculates: a target with known probabilities, drafters that say what they are told,
and the smallest engine that joins them."""

from lamella.specdec.testing.decode import decode
from lamella.specdec.testing.scripted_drafter import ScriptedDrafter
from lamella.specdec.testing.scripted_model import ScriptedModel

__all__ = ["ScriptedDrafter", "ScriptedModel", "decode"]
