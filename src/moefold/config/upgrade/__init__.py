"""Recipes of earlier versions, with flat keys, in today's tables of parts."""
