"""Recipes: everything that decides a run, as one frozen value that TOML files hold (no torch)."""

from slipstream.train.recipe.recipe import Recipe, load_recipe, parse_recipe, recipe_names

__all__ = ["Recipe", "load_recipe", "parse_recipe", "recipe_names"]
