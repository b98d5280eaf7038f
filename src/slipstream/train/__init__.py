"""Training: recipe, loop, checkpoints, launch. Nothing is imported here: pure parts stay pure."""
