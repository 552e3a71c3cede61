"""The room that reads losses: terms, denominators, laws, and how each piece is scaled."""

from anybatch.exact.nodes import DENOMINATOR_ATTRIBUTE, register

__all__ = ["DENOMINATOR_ATTRIBUTE", "register"]
