"""The recipe: schema, loading, rules, and what `auto` becomes."""

from packtrain.config.load import build_recipe, dump_recipe, load_recipe
from packtrain.config.schema import Recipe

__all__ = ["Recipe", "build_recipe", "dump_recipe", "load_recipe"]
